"""Convert explanations to the contents of an interactive page: maps, names, and the code that selects each map."""

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

PARTIAL_NOTE = "This page has heatmaps of {some} of the model's {total} classes. Use gradcam page for all classes."


def show_explanation(explanation: Any, i: int, name: str) -> Page:
    """Return the page of image i with the maps of an explanation; raise the errors of `Explanation.select`."""
    single = explanation.select(i).cpu() if len(explanation.images) > 1 else explanation.cpu()
    page_targets, order = list_things(single)
    maps = to_map_set(single.maps[0].numpy()[order], single)
    total = 0
    with contextlib.suppress(GradcamError):  # raised if the output has no class scores
        total = single.probabilities().shape[1] if page_targets.kind == "class" else 0
    notes = [PARTIAL_NOTE.format(some=len(page_targets.names), total=total)] if total > len(page_targets.names) else []
    notes += [note for note in single.notes if note]
    return Page(name, single.images[0], single.regions[0], "model", page_targets, [maps], total=total, notes=notes)


def to_map_set(maps: Any, explanation: Any, target_indices: Sequence[int] | None = None) -> MapSet:
    """Convert maps (K,h,w) of an explanation to a `MapSet`. If the evidence is negative, values become negative."""
    sign, evidence = (-1, "signed") if explanation.evidence == "negative" else (1, explanation.evidence)
    values = sign * np.asarray(maps, np.float32)
    return MapSet(explanation.layer or "input", explanation.method, evidence, values, targets=target_indices)


def list_things(explanation: Any) -> tuple[PageTargets, list[int]]:
    """Return the targets that the maps explain, and the order of the maps; classes are sorted by probability."""
    count = explanation.maps.shape[1]
    instances = [explanation.instance(0, k) for k in range(count)]
    if any(instance is not None for instance in instances):
        return _list_instances(explanation, instances), list(range(count))
    if explanation.classes is None:
        names = [explanation.name_class(0, k) for k in range(count)]
        blank = [None] * count
        return PageTargets("score", names, blank, blank, words=blank, code=blank), list(range(count))
    indices = [int(index) for index in explanation.classes[0]]
    probabilities: list[float | None] = [None] * count
    with contextlib.suppress(GradcamError):
        probabilities = [float(probability) for probability in explanation.probabilities()[0, indices]]
    order = sorted(range(count), key=lambda k: -(probabilities[k] or 0))
    return list_classes([indices[k] for k in order], explanation.labels, [probabilities[k] for k in order]), order


def list_classes(indices: Sequence[int], labels: Sequence[str] | None, probabilities: Sequence[Any]) -> PageTargets:
    """Return page targets for the classes `indices`, in the same order."""
    names = [name_class(index, None if labels is None else labels[index]) for index in indices]
    return PageTargets("class", names, indices, probabilities)


def _list_instances(explanation: Any, instances: Sequence[Instance | None]) -> PageTargets:
    entries = [instance if instance is not None else Instance("score", "") for instance in instances]
    numbers = ["" if instance.number is None else f"{instance.kind} {instance.number}, " for instance in entries]
    names = [_to_name(instance) or explanation.name_class(0, k) for k, instance in enumerate(entries)]
    names = [f"{number}{name}" for number, name in zip(numbers, names)]
    indices = [instance.index for instance in entries]
    boxes = [None if entry.box is None else [round(float(edge), 1) for edge in entry.box] for entry in entries]
    words, code = map(list, zip(*map(_to_words, entries)))
    probabilities = [find_probability(instance) for instance in entries]
    return PageTargets(entries[0].kind, names, indices, probabilities, boxes=boxes, words=words, code=code)


def find_probability(instance: Instance) -> float | None:
    """Return the score of an instance; None if it is a cosine instead of a probability, or if there is no score."""
    return None if instance.score is None or instance.kind in ("text", "like") else float(instance.score)


def _to_name(instance: Instance) -> str:
    """Return the display name of an instance; paths of reference images lose their folder, because pages are shared."""
    return f"like {PurePath(instance.name).name}" if instance.kind == "like" else instance.name


def _to_words(instance: Instance) -> tuple[list[str] | None, str | None]:
    """Return the arguments of `gradcam run` and the Python code that select an instance, or (None, None)."""
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
