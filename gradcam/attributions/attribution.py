"""What the methods in input space give."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradcam.arrays import SUFFIXES, check_suffix, write_arrays
from gradcam.errors import ImageError


@dataclass(frozen=True, eq=False)
class Attribution:
    """How much each value of N pictures matters to K scores of each.

    `values`: float32 (N,K,C,H,W), or (N,K,C,D,H,W) for volumes; signed, in units of the score (per unit of the picture,
    where the method gives gradients), neither cut off nor normalised.
    `classes`: int64 (N,K), None where the target was a function. `scores`: float32 (N,K), what was explained.
    `output`: the model's own for the pictures, detached. `method`: its name. `layer`: where Grad-CAM was taken, None
    without. `gaps`: float32 (N,K), of integrated gradients alone. Tensors are on the images' device.
    """

    values: Tensor
    classes: Tensor | None
    scores: Tensor
    output: Any = field(repr=False)
    method: str
    layer: str | None
    gaps: Tensor | None

    def __repr__(self) -> str:
        images, classes, channels = self.values.shape[:3]
        place = "" if self.layer is None else f" at {self.layer}"
        gap = "" if self.gaps is None else f"gap at most {self.gaps.abs().max().item():.2g}, "
        size = " x ".join(map(str, self.values.shape[3:]))
        return (
            f"{type(self).__name__}({images} image(s), {classes} score(s) each, {self.method}{place}, "
            f"{channels} channel(s) of {size}, {gap}{self.values.device})"
        )

    def save(self, path: str | os.PathLike[str], i: int | None = None, k: int | None = None) -> None:
        """Write it for NumPy: all of it to an `.npz` file, or the values (C,H,W) of one score to an `.npy` file.

        As `Explanation.save` does, with `values`, `classes`, `scores`, `gaps`, `method` and `layer`, as far as there are.
        Raises `ImageError` as that does.
        """
        if check_suffix(path) not in SUFFIXES:
            raise ImageError(
                f"{path}: this attribution has no picture to be placed on: gradcam.write_image({os.fspath(path)!r}, "
                "gradcam.attributions.draw_attribution(attribution.values[0, 0])); or save it as .npz"
            )
        tensors = {name: getattr(self, name) for name in ("values", "classes", "scores", "gaps")}
        write_arrays(path, tensors, {"method": self.method, "layer": self.layer}, i, k)
