"""Choose objects and classes by name, number or overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradcam.errors import TargetError, find_similar_names, join_names, shorten


def find_overlaps(boxes: Tensor, box: Sequence[float]) -> Tensor:
    """Return the intersection over union of boxes (M,4) with one box."""
    from torchvision.ops import box_iou  # This import is slow, and class targets do not need it.

    return box_iou(boxes, boxes.new_tensor([box]))[:, 0]


def to_label(class_: int | str | None, labels: Sequence[str] | None) -> int | None:
    """Return the index of a class, given by index or name. Raise `TargetError` if the class is unknown."""
    if class_ is None or is_valid_index(class_):
        return class_  # type: ignore[return-value]  # It is an int or None.
    if labels is None:
        raise TargetError(f"The model has no class names: pass the index of {shorten(class_)} instead.")
    indices = {label.casefold(): index for index, label in reversed(list(enumerate(labels)))}
    if not isinstance(class_, str) or class_.casefold() not in indices:
        suggestions = find_similar_names(str(class_), labels) or labels[:5]
        raise TargetError(f"There is no class {shorten(class_)}. Nearest: {join_names(suggestions)}.")
    return indices[class_.casefold()]


def is_valid_index(value: Any) -> bool:
    """Return whether a value is an integer of at least 0, such as a class index or the number of a box."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
