"""ImageNet's classes, in the order that torchvision, timm and this package's own model have them in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradcam.classifiers.embedded import read_labels
from gradcam.classifiers.providers.parts import Parts

CLASSES = 1000
NOTE = "Its 1000 classes are taken for ImageNet's: give labels if they are others."


def name_classes(parts: Parts, labels: Sequence[str] | None = None) -> Parts:
    """The same with ImageNet's labels, and a note, where a checkpoint has 1000 classes."""
    if parts.classes != CLASSES:
        return parts
    return replace(parts, labels=labels or read_labels(), activation="softmax", notes=[*parts.notes, NOTE])
