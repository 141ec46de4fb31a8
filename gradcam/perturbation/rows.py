"""What a model gave for several variants of a batch: rows v*N+n, of variant v and image n."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from gradcam.errors import TargetError
from gradcam.nested import map_tensors, tensors
from gradcam.recording import Recorded
from gradcam.rounding import find_slack
from gradcam.sites import at_least_float32
from gradcam.targets import ClassTarget, compute_scores


def score_rows(recorded: Recorded, output: Any, count: int, positions: range) -> Tensor:
    """The scores (v,N,K) of the variants at these positions, of so many that are in the output."""
    scored, images = recorded.scored, recorded.batch.images
    if isinstance(scored.target, ClassTarget):
        logits = scored.target.find_logits(output, count * images).unflatten(0, (count, images))
        logits = logits[positions.start : positions.stop]
        target = scored.target.repeat(len(positions))
        return target.compute(logits.flatten(0, 1)).unflatten(0, (len(positions), images))
    parts = []
    for position in positions:
        rows = operator.itemgetter(slice(position * images, (position + 1) * images))
        part = map_tensors(output, rows) if count > 1 else output
        parts.append(compute_scores(scored.target, part, images).values)
    return torch.stack(parts) if parts else scored.values.detach()[None][:0]


def reproduces_plain(recorded: Recorded, output: Any, count: int) -> bool:
    """Whether there are rows for each variant, of which the first and the last ones are those of the plain pass."""
    images = recorded.batch.images
    if recorded.scored.logits is not None:
        plain = [recorded.scored.logits.detach()]
        try:
            found = [recorded.scored.target.find_logits(output, count * images)]
        except TargetError:
            return False
    else:
        plain, found = list(tensors(recorded.output)), list(tensors(output))
    if len(plain) != len(found):
        return False
    slack = find_slack(recorded)
    return all(_has_rows(one, other, images, count, slack) for one, other in zip(plain, found))


def _has_rows(plain: Tensor, found: Tensor, images: int, count: int, slack: float) -> bool:
    if plain.ndim == 0 or len(plain) != images or found.shape != (count * images, *plain.shape[1:]):
        return False
    if not plain.is_floating_point():
        return True
    plain, found = at_least_float32(plain.detach()), at_least_float32(found)
    allowed = slack * plain.abs().amax()
    return all(bool((rows - plain).abs().amax() <= allowed) for rows in (found[:images], found[-images:]))
