"""What the four tests of a map are judged by: the numbers, and the maps and pictures behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.cam.budget import Progress
from gradcam.errors import show_fields
from gradcam.evaluation.explainers import Explain, run_explain
from gradcam.evaluation.metrics.soundness import (
    Randomisation,
    find_rivals,
    max_sensitivity,
    randomisation,
    rank_correlation,
)
from gradcam.evaluation.subject import Subject, check_heatmaps, count_pixels, draw, rank_pixels

SHARES = (0.1, 0.3, 0.5, 0.7)
PLACES = 20
MARKED = 0.3  # the share of the pixels that counts as marked where places are compared
DRAWN = 3  # times as many places are drawn as are taken


@dataclass(frozen=True)
class Covering:
    """What is left of N probabilities when shares of the picture are covered in a map's order, and in that of P others.

    `own`: float32 (N,S), by the map. `elsewhere`: float32 (N,P,S), by the same map laid elsewhere. `placed`: float32
    (N,P,H,W), these maps. `rates`: float32 (N,) in [0,1], the share of the P over which the map's own mean is lower;
    equal ones count half.
    """

    shares: tuple[float, ...]
    own: Tensor
    elsewhere: Tensor
    placed: Tensor = field(repr=False)

    @property
    def rates(self) -> Tensor:
        own, elsewhere = self.own.mean(1, keepdim=True), self.elsewhere.mean(2)
        return ((elsewhere > own).float() + (elsewhere == own).float() / 2).mean(1)


def cover(
    subject: Subject,
    heatmaps: Any,
    *,
    shares: Sequence[float] = SHARES,
    places: int = PLACES,
    seed: int = 0,
    progress: Progress | None = None,
) -> Covering:
    """Cover the most relevant pixels with the picture's mean, share after share, and as many of the map laid elsewhere.

    Elsewhere are the map's mirror images and quarter turns (half turns where the picture is no square), shifted by chance
    and around the picture's borders: masks of the same area and shape. Three times as many are drawn as `places`, and those
    are taken whose most relevant three tenths lie least on the map's own. Pixels of one value are in an order by
    chance, so that a constant map is the same everywhere, with a rate of one half; a map that knows nothing of the picture
    has any rate with equal chance.

    Raises `ImageError` for heatmaps of another form.
    """
    maps = check_heatmaps(heatmaps, subject.size, subject.images.device)
    placed = torch.stack([_choose_places(each, places, seed) for each in maps])
    everywhere = torch.cat([maps[:, None], placed], 1)
    total = everywhere.shape[1] * len(shares)
    variants = _covered(subject.images, everywhere, shares, seed)
    found = subject.score(variants if progress is None else _counted(variants, total, progress))
    left = found.reshape(1 + places, len(shares), len(maps)).permute(2, 0, 1)
    return Covering(tuple(shares), left[:, 0], left[:, 1:], placed)


def find_marked(heatmaps: Tensor, share: float, seed: int = 0) -> Tensor:
    """The most relevant share of the pixels, bool (N,H,W)."""
    return rank_pixels(heatmaps, seed) < count_pixels(share, heatmaps[0].numel())


def fill(images: Tensor, masks: Tensor) -> Tensor:
    """Images (N,C,H,W) whose pixels in masks (N,H,W) have the mean of their image, in each channel."""
    return torch.where(masks[:, None], images.mean((2, 3), keepdim=True), images)


def _covered(images: Tensor, maps: Tensor, shares: Sequence[float], seed: int) -> Iterator[Tensor]:
    """The images, covered by each of the maps (N,P,H,W), share after share."""
    for place in maps.unbind(1):
        for share in shares:
            yield fill(images, find_marked(place, share, seed))


def _counted(variants: Iterator[Tensor], total: int, progress: Progress) -> Iterator[Tensor]:
    for done, variant in enumerate(variants, start=1):
        yield variant
        progress(done, total)


def _choose_places(heatmap: Tensor, places: int, seed: int) -> Tensor:
    """One map (H,W) at so many other places (P,H,W), those that overlap the least first."""
    generator = draw(seed, "elsewhere")
    drawn = torch.stack([_move(heatmap, generator) for _ in range(DRAWN * places)])
    marked = find_marked(heatmap[None], MARKED, seed)
    overlaps = (find_marked(drawn, MARKED, seed) & marked).flatten(1).sum(1)
    return drawn[overlaps.argsort(stable=True)[:places]]


def _move(heatmap: Tensor, generator: torch.Generator) -> Tensor:
    """Turned, mirrored and shifted by chance."""
    height, width = heatmap.shape
    turns, mirrored, down, right = (
        int(torch.randint(most, (1,), generator=generator, dtype=torch.int64, device="cpu"))
        for most in (4, 2, height, width)
    )
    if height != width:
        turns = 2 * (turns % 2)
    turned = torch.rot90(heatmap, turns)
    return (turned.flip(1) if mirrored else turned).roll((down, right), (0, 1))


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
