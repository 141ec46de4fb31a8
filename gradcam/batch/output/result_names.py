"""What results are called: one rule for all commands that write them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradcam.attributions import ATTRIBUTIONS
from gradcam.methods import METHODS
from gradcam.naming import LONGEST_NAME, cut, overlay_name

if TYPE_CHECKING:
    from gradcam.batch.findings import Drawing, Question

COMPARISON = "compare"  # in place of a method, in the name of a panel


def has_layer(method: str) -> bool:
    """Whether a method of either kind looks at a layer."""
    return ATTRIBUTIONS[method].has_layer if method in ATTRIBUTIONS else METHODS[method].place == "layer"


def list_endings(
    question: Question, drawings: Sequence[Drawing], labels: Sequence[str] | None, *, suffix: str = ".png"
) -> list[str]:
    """What follows the stem in the name of each result of one picture: class and layer are in it where there are several."""
    several_classes = len({drawing.index for drawing in drawings}) > 1
    several_layers = len(question.layers) > 1
    return [
        overlay_name(
            "",
            drawing.method,
            index=drawing.index if several_classes else None,
            label=labels[drawing.index] if several_classes and labels is not None else None,
            layer=drawing.layer if several_layers and has_layer(drawing.method) else None,
            evidence=name_evidence(drawing.evidence) if drawing.method in question.methods else None,
            suffix=suffix,
        )
        for drawing in drawings
    ]


def panel_ending(evidence: str, *, suffix: str = ".png") -> str:
    """What follows the stem in the name of a panel."""
    return overlay_name("", COMPARISON, evidence=name_evidence(evidence), suffix=suffix)


def name_evidence(evidence: str) -> str | None:
    """The kind of evidence, for a name that says it where it is not the usual one."""
    return None if evidence == "positive" else evidence


def name_result(stem: str, ending: str) -> str:
    """A result's name, relative to the output folder; `stem` may have folders.

    A stem that is too long is cut, and gets a hash of all of it, so that no other picture's results are called alike.
    """
    folders, slash, name = stem.rpartition("/")
    room = LONGEST_NAME - len(os.fsencode(ending))
    if len(os.fsencode(name)) > room:
        mark = "-" + hashlib.sha256(os.fsencode(name)).hexdigest()[:8]
        name = cut(name, room - len(mark)) + mark
    return folders + slash + name + ending
