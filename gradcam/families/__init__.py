"""How families of models that do more than classify are run and read: one row of a table, and one file, for each."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from gradcam.families.base import Captioner, Detector, Embedder, Family, PoseFinder, Segmenter

Kind = TypeVar("Kind", bound=Family)
DEEPEST = 2  # levels below a model at which the one that it wraps is looked for


@dataclass(frozen=True)
class Row:
    """Models whose class is called so, by its full name, and `module:class` of what reads them, in this package."""

    pattern: str
    reader: str


# The first row that fits is taken; a class of a user's own that extends one of these is read as that.
FAMILIES = (
    Row(
        r"torchvision\.models\.detection\.\w+\.(FasterRCNN|MaskRCNN|KeypointRCNN)",
        "torchvision_detection:RegionDetector",
    ),
    Row(r"torchvision\.models\.detection\.\w+\.(RetinaNet|FCOS|SSD)", "torchvision_detection:AnchorDetector"),
)


def find_family(model: nn.Module, kind: type[Kind]) -> Kind | None:
    """What reads the model, or the one inside it; None for a model of no known family of that kind."""
    return next((found for found in list_families(model) if isinstance(found, kind)), None)


def list_families(model: nn.Module) -> Iterator[Family]:
    """All that reads a model, or models up to `DEEPEST` levels inside it, the outermost first."""
    inside = [(name, each) for name, each in model.named_modules() if name.count(".") < DEEPEST]
    for name, each in sorted(inside, key=lambda it: it[0].count(".") + bool(it[0])):
        names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(each).__mro__]
        for row in FAMILIES:
            if any(re.fullmatch(row.pattern, full) for full in names):
                place, _, reader = row.reader.partition(":")
                made: Any = getattr(importlib.import_module(f"{__name__}.{place}"), reader)
                yield made(each, name)


__all__ = [
    "FAMILIES",
    "Captioner",
    "Detector",
    "Embedder",
    "Family",
    "PoseFinder",
    "Segmenter",
    "find_family",
    "list_families",
]
