"""Whether covering what a map marks matters more than covering as much, in the same shape, elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradcam.effort import Progress
from gradcam.evaluation.heatmaps import check_heatmaps
from gradcam.evaluation.ordering import count_pixels, rank_pixels
from gradcam.evaluation.seeds import draw
from gradcam.evaluation.subject import Subject

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
