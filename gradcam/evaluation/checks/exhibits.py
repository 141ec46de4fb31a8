"""What the four tests of a map are judged by: the numbers, and the maps and pictures behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradcam.effort import Progress
from gradcam.errors import show_fields
from gradcam.evaluation.checks.covering import PLACES, SHARES, Covering, cover
from gradcam.evaluation.classes import find_rivals
from gradcam.evaluation.explainers import Explain, run_explain
from gradcam.evaluation.heatmaps import check_heatmaps
from gradcam.evaluation.noise import max_sensitivity
from gradcam.evaluation.randomising import Randomisation, randomisation
from gradcam.evaluation.ranks import rank_correlation
from gradcam.evaluation.seeds import draw
from gradcam.evaluation.subject import Subject

STAGES = 8
OTHERS = 10  # classes drawn by chance, beside the strongest rival
SAMPLES = 10
NOISE = 0.02  # the largest change of a value, as a share of the image's whole range


@dataclass(frozen=True, eq=False)
class Exhibits:
    """Of one image: its map (H,W), how alike the maps of other classes and other weights are, what covering does.

    `rivals`: the most probable other class, and others drawn by chance; `rival_maps` (K,H,W), and `likeness` (K,), their
    rank correlation with the map. `sensitivity`: its largest relative change among `noisy_maps` (S,H,W).
    """

    heatmap: Tensor
    randomisation: Randomisation
    rivals: tuple[int, ...]
    rival_maps: Tensor
    likeness: Tensor
    covering: Covering
    sensitivity: float
    noisy_maps: Tensor

    __repr__ = show_fields

    @property
    def is_constant(self) -> bool:
        """Whether the map is the same everywhere, and marks nothing."""
        return bool(self.heatmap.amax() == self.heatmap.amin())

    @property
    def values(self) -> dict[str, float]:
        """The number of each test. That of classes is of those drawn by chance, where there are any."""
        by_chance = self.likeness[1:] if len(self.likeness) > 1 else self.likeness
        return {
            "randomisation": float(self.randomisation.correlations.mean()),
            "classes": float(by_chance.mean()),
            "covering": float(self.covering.rates),
            "stability": self.sensitivity,
        }


def collect(subject: Subject, explain: Explain, *, seed: int = 0, progress: Progress | None = None) -> Exhibits:
    """Everything of one image: N is 1. Raises as `explain` and the functions of the four tests do."""
    rivals = _choose_rivals(subject, seed)
    watch = _Watch(explain, progress, 1 + STAGES + len(rivals) + SAMPLES + (1 + PLACES) * len(SHARES))
    made = watch(subject.model, subject.images, subject.classes)
    heatmap = check_heatmaps(made, subject.size, subject.images.device)
    randomised = randomisation(subject, watch, heatmap, stages=STAGES, seed=seed)
    watch.reach(1 + STAGES)  # of which a small model has fewer
    found = [watch(subject.model, subject.images, _to_classes(subject, rival)) for rival in rivals]
    others = torch.cat([check_heatmaps(each, subject.size, subject.images.device) for each in found])
    likeness = rank_correlation(heatmap.expand(len(rivals), -1, -1), others)
    radius = NOISE * float(subject.images.amax() - subject.images.amin())
    noisy: list[Tensor] = []
    sensitivity = max_sensitivity(subject, watch.keeping(noisy), heatmap, radius=radius, samples=SAMPLES, seed=seed)
    covering = cover(subject, heatmap, seed=seed, progress=watch.add)
    return Exhibits(heatmap[0], randomised, rivals, others, likeness, covering, float(sensitivity), torch.cat(noisy))


class _Watch:
    """An `Explain` that says how many of so many passes are done."""

    def __init__(self, explain: Explain, progress: Progress | None, total: int) -> None:
        self._explain, self._progress, self._total, self._done = explain, progress, total, 0

    def __call__(self, model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        found = run_explain(
            self._explain, model, images.detach(), classes
        )  # detached once more: it may ask for gradients in place
        self.add()
        return found

    def keeping(self, kept: list[Tensor]) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
        """The same, which puts what it gives into a list."""

        def explain(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
            kept.append(check_heatmaps(self(model, images, classes), (len(images), *images.shape[2:])))
            return kept[-1]

        return explain

    def add(self, *_: object) -> None:
        self.reach(self._done + 1)

    def reach(self, done: int) -> None:
        self._done = done
        if self._progress is not None:
            self._progress(self._done, self._total)


def _choose_rivals(subject: Subject, seed: int) -> tuple[int, ...]:
    """The strongest rival, and others by chance."""
    known = int(find_rivals(subject)), int(subject.classes)
    count, generator = subject.all_probabilities.shape[1], draw(seed, "other classes")
    shuffled = torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu").tolist()
    return (known[0], *[index for index in shuffled if index not in known][:OTHERS])


def _to_classes(subject: Subject, index: int) -> Tensor:
    return torch.full_like(subject.classes, index)
