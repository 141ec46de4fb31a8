"""Attributions of pictures from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gradcam.attributions.attribution import Attribution
from gradcam.attributions.drawing import draw_attribution, place
from gradcam.classifiers.explanation import take_one
from gradcam.drawing import sheet
from gradcam.errors import ImageError
from gradcam.images import Pixels, Region, encode_png


@dataclass(frozen=True, eq=False)
class PictureAttribution(Attribution):
    """An `Attribution` that remembers the pictures, and where in them the network looked. A notebook shows it by itself."""

    pictures: Sequence[Pixels] = field(repr=False)
    regions: Sequence[Region] = field(repr=False)
    labels: Sequence[str] | None = field(repr=False)
    notes: Sequence[str | None] = field(repr=False)  # what a person should know of how each picture is shown
    fit: str | None = field(
        default=None, repr=False
    )  # how the network was shown them, where not by its own preprocessing

    __repr__ = Attribution.__repr__

    def picture(self, i: int = 0, k: int = 0) -> Pixels:
        """The k-th attribution of picture i, drawn in colour on grey: RGB, uint8 (H,W,3), as large as the picture.

        It lies on the pixels that the network saw; the grey around them is that of zero, since they did not count.
        Raises `ImageError` where there is no such picture or attribution.
        """
        images, classes = self.values.shape[:2]
        if not (-images <= i < images and -classes <= k < classes):
            raise ImageError(
                f"There is no attribution [{i}, {k}]: there are {images} picture(s), with {classes} attribution(s) each."
            )
        height, width = self.pictures[i].shape[:2]
        return place(draw_attribution(self.values[i, k]), self.regions[i], height, width)

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

    def _repr_png_(self) -> bytes:
        images, classes = self.values.shape[:2]
        if images == classes == 1:
            return encode_png(self.picture())
        return encode_png(sheet([[self.picture(i, k) for k in range(classes)] for i in range(images)]))
