"""Attributions of pictures from files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradcam.arrays import SUFFIXES, check_suffix, choose
from gradcam.attributions.attribution import Attribution
from gradcam.attributions.drawing import draw_attribution, place
from gradcam.classifiers.explanation import Pictured, take_one
from gradcam.images import Pixels, Region, write_image


@dataclass(frozen=True, eq=False)
class PictureAttribution(Pictured, Attribution):
    """An `Attribution` that remembers the pictures, and where in them the network looked. A notebook shows it by itself."""

    pictures: Sequence[Pixels] = field(repr=False)
    regions: Sequence[Region] = field(repr=False)
    labels: Sequence[str] | None = field(repr=False)
    notes: Sequence[str | None] = field(repr=False)  # what a person should know of how each picture is shown
    activation: str = field(repr=False)
    # how the network was shown the pictures, where not by its own preprocessing
    fit: str | None = field(default=None, repr=False)

    __repr__ = Attribution.__repr__

    def picture(self, i: int = 0, k: int = 0) -> Pixels:
        """The k-th attribution of picture i, drawn in colour on grey: RGB, uint8 (H,W,3), as large as the picture.

        It lies on the pixels that the network saw; the grey around them is that of zero, since they did not count.
        Raises `ImageError` where there is no such picture or attribution.
        """
        choose(i, k, tuple(self.values.shape), "attribution")
        height, width = self.pictures[i].shape[:2]
        return place(draw_attribution(self.values[i, k]), self.regions[i], height, width)

    def save(self, path: str | os.PathLike[str], i: int | None = None, k: int | None = None) -> None:
        """Write what `picture` draws to a picture's file, or the values to `.npz` or `.npy` as any `Attribution` does.

        `i`, `k`: as in `picture`; without them all there are, on a sheet with a row for each picture where they are several.
        Raises `ImageError` as `PictureExplanation.save` does.
        """
        if check_suffix(path) in SUFFIXES:
            super().save(path, i, k)
        else:
            write_image(path, self._draw_all(i, k))

    def one(self, i: int) -> PictureAttribution:
        """Picture i's alone."""
        images, picture = len(self.pictures), slice(i, i + 1)
        return replace(
            self,
            values=self.values[picture],
            classes=None if self.classes is None else self.classes[picture],
            scores=self.scores[picture],
            output=take_one(self.output, i, images),
            gaps=None if self.gaps is None else self.gaps[picture],
            pictures=self.pictures[picture],
            regions=self.regions[picture],
            notes=self.notes[picture],
        )

    def cpu(self) -> PictureAttribution:
        """The same, with its values on the CPU; the model's output stays where it is."""
        return replace(
            self,
            values=self.values.cpu(),
            classes=None if self.classes is None else self.classes.cpu(),
            scores=self.scores.cpu(),
            gaps=None if self.gaps is None else self.gaps.cpu(),
        )

    def _draw_one(self, i: int, k: int, **options: Any) -> Pixels:
        return self.picture(i, k)
