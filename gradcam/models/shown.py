"""What a page shows of an explanation: which things its maps are of, and how each of them is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from gradcam.errors import GradcamError
from gradcam.models.labels import name_class
from gradcam.targets.base import Instance
from gradcam.web.page import MapSet, Page, PageTargets

ONLY = "This page has heatmaps of {some} of the model's {total} classes. Use gradcam page for all classes."


def show_explanation(explanation: Any, i: int, name: str) -> Page:
    """The page of an explanation's picture i, with the maps that the explanation has. Raises as `Explanation.select`."""
    one = explanation.select(i).cpu() if len(explanation.images) > 1 else explanation.cpu()
    things, order = list_things(one)
    maps = to_set(one.maps[0].numpy()[order], one)
    total = 0
    with contextlib.suppress(GradcamError):  # of what has no classes
        total = one.probabilities().shape[1] if things.kind == "class" else 0
    notes = [ONLY.format(some=len(things.names), total=total)] if total > len(things.names) else []
    notes += [note for note in one.notes if note]
    return Page(name, one.images[0], one.regions[0], "model", things, [maps], total=total, notes=notes)


def to_set(maps: Any, explanation: Any, things: Sequence[int] | None = None) -> MapSet:
    """Maps (K,h,w) of an explanation; negative evidence, which an explanation has without its sign, gets it back."""
    sign, evidence = (-1, "signed") if explanation.evidence == "negative" else (1, explanation.evidence)
    values = sign * np.asarray(maps, np.float32)
    return MapSet(explanation.layer or "input", explanation.method, evidence, values, targets=things)


def list_things(one: Any) -> tuple[PageTargets, list[int]]:
    """What an explanation of one picture has maps of, the surest first where these are classes, and its maps' order."""
    count = one.maps.shape[1]
    instances = [one.instance(0, k) for k in range(count)]
    if any(it is not None for it in instances):
        return _list_instances(one, instances), list(range(count))
    if one.classes is None:
        names = [one.name_class(0, k) for k in range(count)]
        return PageTargets("score", names, [None] * count, [None] * count, words=[None] * count, code=[None] * count), [
            *range(count)
        ]
    indices = [int(it) for it in one.classes[0]]
    shares: list[float | None] = [None] * count
    with contextlib.suppress(GradcamError):
        shares = [float(it) for it in one.probabilities()[0, indices]]
    order = sorted(range(count), key=lambda k: -(shares[k] or 0))
    return list_classes([indices[k] for k in order], one.labels, [shares[k] for k in order]), order


def list_classes(indices: Sequence[int], labels: Sequence[str] | None, shares: Sequence[float | None]) -> PageTargets:
    """Classes in this order."""
    names = [name_class(index, None if labels is None else labels[index]) for index in indices]
    return PageTargets("class", names, indices, shares)


def _list_instances(one: Any, instances: Sequence[Instance | None]) -> PageTargets:
    known = [it if it is not None else Instance("score", "") for it in instances]
    said = [_to_words(it) for it in known]
    numbers = ["" if it.number is None else f"{it.kind} {it.number}, " for it in known]
    return PageTargets(
        known[0].kind,
        [f"{number}{_to_name(it) or one.name_class(0, k)}" for k, (number, it) in enumerate(zip(numbers, known))],
        [it.index for it in known],
        [None if it.score is None or it.kind in ("text", "like") else float(it.score) for it in known],
        boxes=[None if it.box is None else [round(float(side), 1) for side in it.box] for it in known],
        words=[words for words, _ in said],
        code=[code for _, code in said],
    )


def _to_name(instance: Instance) -> str:
    """What it is called; of another picture the name alone, since a page may be given to others."""
    return f"like {PurePath(instance.name).name}" if instance.kind == "like" else instance.name


def _to_words(instance: Instance) -> tuple[list[str] | None, str | None]:
    """What `gradcam run`, and Python, are told to explain it; None where a line does not say it."""
    number, kind = instance.number, instance.kind
    if kind == "box" and number is not None and instance.edge is None:
        return ["--box", str(number)], f"gradcam.targets.Box({number})"
    if kind == "keypoint" and number is not None:
        return ["--keypoint", str(number)], f"gradcam.targets.Keypoint({number})"
    if kind == "word" and number is not None:
        return ["--word", str(number)], f"gradcam.targets.Token(None, [{number}])"
    if kind == "text" and not instance.against:
        return ["--text", instance.name], f"gradcam.targets.Text([{instance.name!r}])"
    return None, None
