"""Whether results can be written as they are asked for, none over another or over an input: found out before work begins."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from gradcam.batch.findings import Question
from gradcam.batch.items import Item, find_url
from gradcam.batch.output.result_names import COMPARISON, has_layer, name_evidence
from gradcam.batch.output.saving import HEATMAP, MAP_SUFFIX, Saving
from gradcam.batch.output.shelves import to_shelf
from gradcam.errors import GradcamError, OutputError
from gradcam.naming import to_plain
from gradcam.stores import Store

INDEX, LABEL = "<index>", "<label>"  # in place of a class's, which nobody knows yet; no name has these characters

Words = tuple[str, ...]  # of a name, which dashes divide


@dataclass(frozen=True)
class Endings:
    """All endings that names of results can have: words, and the suffix. `labels`: what the word of a label can be."""

    forms: Sequence[tuple[Words, str]]
    labels: frozenset[str]

    def can_end(self, words: Words, suffix: str) -> bool:
        """Whether a name can end so."""
        return any(suffix == other and self._alike(words, form) for form, other in self.forms)

    def can_meet(self, rest: Words) -> bool:
        """Whether a stem, and the same stem with these words behind it, can both get one name."""
        longer = [(form, suffix) for form, suffix in self.forms if self._alike(rest, form[: len(rest)])]
        return any(self.can_end(form[len(rest) :], suffix) for form, suffix in longer)

    def _alike(self, one: Words, other: Words) -> bool:
        return len(one) == len(other) and all(map(self._same, one, other))

    def _same(self, one: str, other: str) -> bool:
        if INDEX in (one, other):
            word = other if one == INDEX else one
            return word in (INDEX, LABEL) or word.isdecimal()
        if LABEL in (one, other):
            word = other if one == LABEL else one
            return word == LABEL or word in self.labels
        return one == other


def check_outputs(
    folder: Path | Store,
    items: Sequence[Item],
    stems: Mapping[str, str],
    *,
    saving: Saving,
    question: Question,
    labels: Sequence[str] | None,
) -> None:
    """Raises `OutputError` where two pictures' results could have one name, or a result would replace an input.

    `stems`: what the names of each picture's results begin with, by the picture's name, as `plan_stems` gives them.
    Raises `GradcamError` where a panel is asked for, and there are no maps to put on it.
    """
    check_panel(saving, question)
    endings = list_forms(saving, question, labels)
    names = {stems[item.name].casefold(): item.name for item in items}
    for stem, name in names.items():
        for other, rest in _divide(stem):
            if other in names and endings.can_meet(rest):
                raise OutputError(
                    f"{names[other]} and {name}: both would have results of one name; rename one of them, or explain them "
                    "into two folders"
                )
    places: dict[str, list[str]] = {}  # where results go, whatever links lead there
    for parent in {stem.rpartition("/")[0] for stem in stems.values()}:
        places.setdefault(_locate(folder, parent).casefold(), []).append(parent.casefold())
    inputs = _list_places(item.content.path for item in items) if isinstance(folder, Path) else _list_objects(items)
    for path, above, file in inputs:
        for parent in places.get(above, ()):
            stem, suffix = os.path.splitext(f"{parent}/{file}" if parent else file)
            if any(other in names and endings.can_end(rest, suffix) for other, rest in _divide(stem)):
                raise OutputError(
                    f"{path}: a result in {to_shelf(folder).show()} would replace this picture; choose another --output"
                )


def check_panel(saving: Saving, question: Question) -> None:
    """Raises `GradcamError` where a panel is asked for, and there are no maps to put on it."""
    unfit = [name for name in question.methods if not has_layer(name)]
    if not question.methods:
        unfit = list(question.attributions)
    if "panel" in saving.kinds and unfit:
        raise GradcamError(
            f"A panel is made of maps at layers, and {unfit[0]} makes none there: leave one of them out."
        )


def _locate(folder: Path | Store, parent: str) -> str:
    return folder.below(parent).url if isinstance(folder, Store) else os.path.realpath(folder / parent)


def _list_objects(items: Iterable[Item]) -> Iterator[tuple[Path | str, str, str]]:
    """Each object in a store with the folder that it is in, and its name."""
    for url in filter(None, map(find_url, items)):
        above, _, name = url.rpartition("/")
        yield url, above.casefold(), name.casefold()


def _list_places(paths: Iterable[Path | None]) -> Iterator[tuple[Path | str, str, str]]:
    """Each file with the folder and the name that it really has; a link's own as well as its target's."""
    folders: dict[Path, str] = {}
    for path in filter(None, paths):
        if path.parent not in folders:
            folders[path.parent] = os.path.realpath(path.parent)
        yield path, folders[path.parent].casefold(), path.name.casefold()
        if path.is_symlink():
            above, name = os.path.split(os.path.realpath(path))
            yield path, above.casefold(), name.casefold()


def list_forms(saving: Saving, question: Question, labels: Sequence[str] | None) -> Endings:
    """The endings of this question's results."""
    several_classes = question.target.top > 1 or len((question.target.classes or [[]])[0]) > 1
    classes: list[Words] = [(), (INDEX,) if labels is None else (INDEX, LABEL)] if several_classes else [()]
    words: list[Words] = []
    for method in (*question.methods, *question.attributions):
        several_layers = len(question.layers) > 1 and has_layer(method)
        layers: list[Words] = [(to_plain(layer),) for layer in question.layers] if several_layers else [()]
        evidence = name_evidence(question.evidence) if method in question.methods else None
        words += [
            (*method.split("-"), *one, *layer, *([evidence] if evidence else []))
            for one, layer in product(classes, layers)
        ]
    evidence = name_evidence(question.evidence)
    suffix = saving.suffix
    forms = {
        "overlay": [(each, suffix) for each in words],
        "heatmap": [((*each, HEATMAP), suffix) for each in words],
        "map": [(each, MAP_SUFFIX) for each in words],
        "panel": [((COMPARISON, *([evidence] if evidence else [])), suffix)],
    }
    found = [(tuple(map(str.casefold, each)), suffix) for kind in saving.kinds for each, suffix in forms[kind]]
    return Endings(found, frozenset(to_plain(label).casefold() for label in labels or ()))


def _divide(stem: str) -> Iterator[tuple[str, Words]]:
    """Each part of a stem that ends at a dash, and the words behind it."""
    words = stem.split("-")
    for count in range(1, len(words)):
        yield "-".join(words[:count]), tuple(words[count:])
