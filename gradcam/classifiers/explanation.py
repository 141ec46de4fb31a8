"""Explanations of pictures from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from gradcam.drawing import overlay, sheet
from gradcam.errors import ImageError
from gradcam.explanation import Explanation
from gradcam.images import Pixels, Region, encode_png
from gradcam.nested import map_tensors
from gradcam.scores import probabilities
from gradcam.targets import ClassTarget


@dataclass(frozen=True, eq=False)
class PictureExplanation(Explanation):
    """An `Explanation` that remembers the pictures, and where in them the network looked. A notebook shows it by itself."""

    pictures: Sequence[Pixels] = field(repr=False)
    regions: Sequence[Region] = field(repr=False)
    labels: Sequence[str] | None = field(repr=False)
    notes: Sequence[str | None] = field(repr=False)  # what a person should know of how each picture is shown
    activation: str = field(repr=False)
    fit: str | None = field(
        default=None, repr=False
    )  # how the network was shown them, where not by its own preprocessing

    __repr__ = Explanation.__repr__

    def overlay(
        self, i: int = 0, k: int = 0, *, alpha: float = 0.5, colormap: str = "turbo", outline: bool = True
    ) -> Pixels:
        """Picture i with its k-th heatmap, on the pixels that the network saw, outlined or not: RGB, uint8 (H,W,3).

        Signed evidence is red for the class and blue against it, whatever the colour map.
        Raises `ImageError` where there is no such picture or heatmap.
        """
        images, classes = self.maps.shape[:2]
        if not (-images <= i < images and -classes <= k < classes):
            raise ImageError(f"There is no map [{i}, {k}]: there are {images} picture(s), with {classes} map(s) each.")
        heatmap = self.heatmaps[i, k]
        signed = self.evidence == "signed"
        look: dict[str, Any] = {"alpha": alpha, "colormap": colormap, "signed": signed, "outline": outline}
        return overlay(self.pictures[i], heatmap, region=self.regions[i], **look)

    def probabilities(self) -> Tensor:
        """All classes' probabilities: float32 (N,C)."""
        return to_probabilities(self.output, len(self.pictures), self.activation)

    def one(self, i: int) -> PictureExplanation:
        """Picture i's alone."""
        images, picture = len(self.pictures), slice(i, i + 1)
        return replace(
            self,
            maps=self.maps[picture],
            heatmaps=self.heatmaps[picture],
            classes=None if self.classes is None else self.classes[picture],
            scores=self.scores[picture],
            output=take_one(self.output, i, images),
            pictures=self.pictures[picture],
            regions=self.regions[picture],
            notes=self.notes[picture],
        )

    def cpu(self) -> PictureExplanation:
        """The same, with its maps on the CPU; the model's output stays where it is."""
        return replace(
            self,
            maps=self.maps.cpu(),
            heatmaps=self.heatmaps.cpu(),
            classes=None if self.classes is None else self.classes.cpu(),
            scores=self.scores.cpu(),
        )

    def _repr_png_(self) -> bytes:
        images, classes = self.maps.shape[:2]
        if images == classes == 1:
            return encode_png(self.overlay())
        return encode_png(sheet([[self.overlay(i, k) for k in range(classes)] for i in range(images)]))


def take_one(output: Any, i: int, images: int) -> Any:
    """What a model gave for image i, of so many: (1,...) in place of (N,...) wherever there is a row for each."""
    return map_tensors(output, lambda tensor: tensor[i : i + 1] if tensor.shape[:1] == (images,) else tensor)


def to_probabilities(output: Any, images: int, activation: str) -> Tensor:
    """All classes' probabilities, float32 (N,C), in what a model gave for so many images."""
    return probabilities(ClassTarget(activation=activation).find_logits(output, images), activation)
