"""What is written of each result, and how."""

from __future__ import annotations

from dataclasses import dataclass

from gradcam.choices import FORMATS, SAVED
from gradcam.drawing import find_colormap
from gradcam.errors import GradcamError, join_names, shorten

HEATMAP = "heatmap"  # behind the name of an overlay
MAP_SUFFIX = ".npy"


@dataclass(frozen=True)
class Saving:
    """What is written of each result, and how.

    `kinds`: keys of `choices.SAVED`. "overlay": the heatmap on the picture, or an attribution's own. "heatmap": its colours
    alone, as large as the picture, on black. "map": the raw values as NumPy's float32, (h,w) on the region that the
    network saw, or an attribution's signed (C,H,W). "panel": one picture with all maps side by side.
    `format`: one of `choices.FORMATS`; `quality`, 1 to 100, is of jpg and webp. `alpha`, `colormap`: as in
    `gradcam.overlay`.
    `views`: whether a report's views are written as well.

    Raises `GradcamError` for anything else.
    """

    kinds: tuple[str, ...] = ("overlay",)
    format: str = "jpg"
    quality: int = 90
    alpha: float = 0.5
    colormap: str = "turbo"
    views: bool = False

    def __post_init__(self) -> None:
        if not self.kinds or not set(self.kinds) <= set(SAVED):
            raise GradcamError(f"What is to be written is {shorten(self.kinds)}, expected some of {join_names(SAVED)}.")
        if self.format not in FORMATS:
            raise GradcamError(f"The format is {shorten(self.format)}, expected one of {join_names(FORMATS)}.")
        if isinstance(self.quality, bool) or not isinstance(self.quality, int) or not 1 <= self.quality <= 100:
            raise GradcamError(f"quality is {shorten(self.quality)}, expected a whole number from 1 to 100.")
        if not isinstance(self.alpha, (int, float)) or not 0 <= self.alpha <= 1:
            raise GradcamError(f"alpha is {shorten(self.alpha)}, expected an opacity from 0 to 1.")
        find_colormap(self.colormap)

    @property
    def suffix(self) -> str:
        """What pictures end in."""
        return f".{self.format}"
