"""Repeat a target for the augmented views of a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradcam.errors import TargetError
from gradcam.hooks.containers import has_rows, take_rows
from gradcam.targets.base import ScoreExtractor, TargetScores
from gradcam.targets.classes import compute_scores, is_function, resolve_logits, to_class_target


@dataclass(frozen=True)
class RepeatedTarget(ScoreExtractor):
    """A target for a batch of augmented views, one after another: each of the `blocks` views has `images` rows."""

    target: Any
    images: int
    blocks: int

    def score(self, output: Any, images: int) -> TargetScores:
        """Return the scores of all rows. Top classes and default rivals are determined from the first view only."""
        total = self.images * self.blocks
        if is_function(self.target):
            parts = [compute_scores(self.target, self._block(output, i), self.images) for i in range(self.blocks)]
            return TargetScores(torch.cat([part.values for part in parts]), None, None, self, parts[0].instances)
        class_target, logits = resolve_logits(to_class_target(self.target), output, total)
        first = compute_scores(replace(class_target, output=None), logits[: self.images], self.images).target
        target = first.repeat(self.blocks)
        repeated = replace(self, target=replace(first, output=class_target.output))
        return TargetScores(target.compute(logits), target.classes, logits, repeated)

    def find_logits(self, output: Any, rows: int) -> Tensor:
        return to_class_target(self.target).find_logits(output, rows)

    def _block(self, output: Any, block: int) -> Any:
        rows = slice(block * self.images, (block + 1) * self.images)
        total = self.images * self.blocks
        if not has_rows(output, total):
            reason = f"has no tensor with {total} rows, so it cannot be split into augmented views"
            raise TargetError(f"The output, {type(output).__name__}, {reason}: explain without augmentation.")
        return take_rows(output, rows, total)
