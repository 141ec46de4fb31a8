"""The result of an explanation: maps, heatmaps, scores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradcam.errors import (
    ImageError,
)
from gradcam.targets.base import Instance


@dataclass(frozen=True, eq=False)
class Explanation:
    """Heatmaps of N images: K class activation maps for each image.

    Volumes have (d,h,w) and (D,H,W) instead of (h,w) and (H,W). Tensors are on the images' device.

    Attributes
    ----------
    maps : Tensor (N,K,h,w)
        The raw output of the method, float32, at the layer's resolution. `evidence` selects the positive values, the
        absolute values of the negative ones, or all values. If the model pads images, a map covers the image only,
        without the padding.
    heatmaps : Tensor (N,K,H,W)
        The maps at the input's size, float32, each divided by its own maximum: from 0 to 1, or from -1 to 1 for signed
        evidence. A blank map stays zero. For a list of images of different sizes, a list of N tensors (K,H,W).
    classes : Tensor (N,K) or None
        The explained classes, int64; None if the target was a function, a sentence or a reference image.
    scores : Tensor (N,K)
        The explained scores, float32. If images have different numbers of boxes, missing boxes have score NaN, class -1
        and a blank map.
    output : Any
        The model's output, detached.
    layer : str
        The target layer's dotted name; "input" or "attention" if the method needs no layer.
    method : str
        The method's name.
    evidence : str
        "positive", "negative" or "signed".
    instances : sequence of sequences of Instance, or None
        The box, mask, sentence or other `gradcam.targets` object that each map of each image explains; None for classes
        and functions.
    detections : sequence of sequences of Instance, or None
        All detections of the model in each image, such as its boxes.
    reference : Explanation or None
        The maps on the reference image, if the target is `targets.Like` with an image.
    layout : str or None
        The layout of the layer's output, such as "channels first" or "tokens"; None if no layer is explained.
    output_name : str or None
        The key or index of the explained tensor in the model's output, such as "logits" or "0"; None if the output is one
        tensor, or the target is a function.

    Examples
    --------
    >>> import gradcam, torch, torchvision
    >>> model = torchvision.models.resnet18(weights=None).eval()
    >>> explanation = gradcam.explain(model, torch.rand(2, 3, 64, 64), "layer4", target=[[1, 2, 3]] * 2)
    >>> explanation
    Explanation(2 image(s), 3 map(s) each, gradcam at layer4, 2 x 2 to 64 x 64, cpu)
    >>> explanation.save("maps.npz")
    """

    maps: Tensor
    heatmaps: Tensor
    classes: Tensor | None
    scores: Tensor
    output: Any = field(repr=False)
    layer: str
    method: str
    evidence: str
    instances: Sequence[Sequence[Instance]] | None = field(default=None, repr=False, kw_only=True)
    detections: Sequence[Sequence[Instance]] | None = field(default=None, repr=False, kw_only=True)
    reference: Explanation | None = field(default=None, repr=False, kw_only=True)
    layout: str | None = field(default=None, repr=False, kw_only=True)
    output_name: str | None = field(default=None, repr=False, kw_only=True)

    def __getattr__(self, name: str) -> Any:
        from gradcam.renames import read_old_attribute

        return read_old_attribute(self, name)

    def __repr__(self) -> str:
        images, classes = self.maps.shape[:2]
        grid = " x ".join(map(str, self.maps.shape[2:]))
        sizes = dict.fromkeys(" x ".join(map(str, heatmap.shape[1:])) for heatmap in self.heatmaps)
        size = ", ".join(sizes)
        kind = "" if self.evidence == "positive" else f"{self.evidence} evidence by "
        return (
            f"{type(self).__name__}({images} image(s), {classes} map(s) each, {kind}{self.method} at {self.layer}, "
            f"{grid} to {size}, {self.maps.device})"
        )

    def save(self, path: str | os.PathLike[str], i: int | None = None, k: int | None = None) -> None:
        """Write the explanation as NumPy arrays: all of it to an ``.npz`` file, or a single map (h,w) to an ``.npy`` file.

        `numpy.load("a.npz")` has `maps`, `heatmaps`, `classes` (unless the target was a function), `scores`, `layer`,
        `method` and `evidence`. A single map has the format of `gradcam batch --save map`. The file is written completely or
        not at all.

        Parameters
        ----------
        path : str or path
            The file, ending in ``.npz`` or ``.npy``. Its folder has to exist.
        i : int, default None
            The image to save; None for all.
        k : int, default None
            The map of that image to save; None for all.

        Raises
        ------
        ImageError
            If the suffix is neither ``.npz`` nor ``.npy``, if there is no such map, or if the file cannot be written.

        Examples
        --------
        >>> import gradcam, numpy, torch, torchvision
        >>> model = torchvision.models.resnet18(weights=None).eval()
        >>> explanation = gradcam.explain(model, torch.rand(1, 3, 64, 64), "layer4")
        >>> explanation.save("map.npy", 0, 0)
        >>> numpy.load("map.npy").shape
        (2, 2)
        """
        from gradcam.images.write import ARRAY_SUFFIXES, check_suffix, write_arrays

        if check_suffix(path) not in ARRAY_SUFFIXES:
            raise ImageError(
                f"{path}: this explanation has no image to draw on. Explain the image file: "
                f"gradcam.load_classifier(model).explain('photo.jpg').save({os.fspath(path)!r}). Or draw one heatmap: "
                "gradcam.overlay(image, explanation.heatmaps[0, 0], region=(top, left, height, width)). Or save it as .npz."
            )
        tensors = {name: getattr(self, name) for name in ("maps", "heatmaps", "classes", "scores")}
        write_arrays(path, tensors, {name: getattr(self, name) for name in ("layer", "method", "evidence")}, i, k)
