"""Boxes and masks of an explanation's heatmaps, in pixels of its images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradcam.images.regions import HeatmapBox, find_boxes, find_mask, place_heatmap
from gradcam.images.write import select_maps
from gradcam.options import BOX_THRESHOLD


class ExplanationRegions:
    """The methods of `ImageExplanation` that turn heatmaps into boxes and masks."""

    def boxes(
        self: Any, i: int = 0, k: int | None = None, *, threshold: float = BOX_THRESHOLD, method: str = "largest"
    ) -> list[HeatmapBox]:
        """Find the boxes of image i, around the regions where a heatmap reaches a share of its maximum.

        The boxes are in pixels of the original image, and lie in the part of the image that the model saw. A blank
        heatmap has no box. With signed evidence, the boxes are around positive evidence.

        Parameters
        ----------
        i : int, default 0
            The image, counted from 0.
        k : int, default None
            The heatmap, counted from 0. None finds the boxes of all heatmaps of the image.
        threshold : float, default 0.3
            The share of the heatmap's maximum, as in `gradcam.find_boxes`.
        method : str, default "largest"
            "largest" or "components", as in `gradcam.find_boxes`.

        Returns
        -------
        list of HeatmapBox
            The boxes of the first heatmap, then of the second, and so on, with the class index and label of each
            heatmap. `score` is the maximum of the heatmap in the box's region.

        Raises
        ------
        ImageError
            If there is no such image or heatmap.
        GradcamError
            If the threshold is out of range, or the method is unknown.

        Examples
        --------
        >>> import gradcam
        >>> explanation = gradcam.load_classifier().explain("photo.jpg", target=[["Egyptian cat", "espresso"]])
        >>> [box.label for box in explanation.boxes()], len(explanation.boxes(k=0, method="components", threshold=0.5))
        (['Egyptian cat', 'espresso'], 1)
        >>> box = explanation.boxes(k=1)[0]
        >>> crop = explanation.images[0][box.top : box.bottom, box.left : box.right]
        """
        boxes: list[HeatmapBox] = []
        for column, values in self._place(i, k):
            name, instance = self.label(i, column), self.instance(i, column)
            index = None if self.classes is None else int(self.classes[i, column])
            if instance is not None:
                index, name = instance.index, instance.name
            regions = find_boxes(values, threshold=threshold, method=method)
            boxes += [replace(box, index=index, label=name) for box in regions]
        return boxes

    def masks(self: Any, i: int = 0, k: int | None = None, *, threshold: float = BOX_THRESHOLD) -> NDArray[np.bool_]:
        """Find the pixels of image i where each heatmap reaches a share of its maximum.

        Pixels that the model did not see are False. The mask of a blank heatmap is empty. With signed evidence, the
        masks show positive evidence.

        Parameters
        ----------
        i : int, default 0
            The image, counted from 0.
        k : int, default None
            The heatmap, counted from 0. None finds the masks of all heatmaps of the image.
        threshold : float, default 0.3
            The share of the heatmap's maximum, as in `gradcam.find_boxes`.

        Returns
        -------
        array (K,H,W)
            bool, one mask of the image's size for each heatmap; K is 1 if `k` is given.

        Raises
        ------
        ImageError
            If there is no such image or heatmap.
        GradcamError
            If the threshold is out of range.

        Examples
        --------
        >>> import gradcam
        >>> explanation = gradcam.load_classifier().explain("photo.jpg")
        >>> explanation.masks(threshold=0.5).shape, explanation.masks().dtype
        ((1, 640, 800), dtype('bool'))
        """
        masks = [find_mask(values, threshold=threshold) for _, values in self._place(i, k)]
        return np.array(masks, bool).reshape(-1, *self.images[i].shape[:2])  # An image may have no instance.

    def _place(self: Any, i: int, k: int | None) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield the number of each selected heatmap, and its values on the image."""
        for column in select_maps(i, k, tuple(self.scores.shape))[1]:
            # An image with fewer instances than other images has fewer heatmaps.
            if self.instances is None or column < len(self.instances[i]):
                yield column, place_heatmap(self.heatmaps[i][column], self.regions[i], *self.images[i].shape[:2])
