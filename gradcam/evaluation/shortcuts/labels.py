"""Which class each picture has: from a table, from the folders that pictures lie in, or as the model predicts it."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from gradcam.errors import InputError, TargetError
from gradcam.models.classifier import Classifier
from gradcam.sources.contents import Item
from gradcam.sources.lists import LIST_SUFFIXES, Entry, read_list

FOLDERS, PREDICTED = "folders", "predicted"
Labels = str | os.PathLike[str] | Mapping[str, str]


@dataclass(frozen=True)
class Labelled:
    """The pictures that have a class, each asking for it; where the model has to say it, none does. `source`: where
    classes come from, for a sentence. `failures`: pictures, lines and classes that are left out, and why."""

    items: Sequence[Item]
    source: str
    failures: Mapping[str, str]


def find_labels(labels: Labels | None, items: Sequence[Item], classifier: Classifier) -> Labelled:
    """Raises `InputError` for labels that cannot be read, and where no picture has any."""
    if labels == PREDICTED:
        return _leave_to_the_model(items)
    if isinstance(labels, Mapping):
        return _label(items, dict(labels), "the labels given", classifier, {})
    if labels is None or labels == FOLDERS:
        folders = {item.name: PurePosixPath(item.name).parent.name for item in items}
        if labels is None and not _are_classes(folders, classifier):
            return _leave_to_the_model(items)
        return _label(items, {name: it for name, it in folders.items() if it}, "the folders' names", classifier, {})
    path = os.fspath(labels)
    if not path.lower().endswith(LIST_SUFFIXES):
        raise InputError(
            f"{path}: expected a table ({', '.join(LIST_SUFFIXES)}) with the columns image and class, or the word "
            f"{FOLDERS} or {PREDICTED}."
        )
    given, failures = _match(read_list(os.path.abspath(path)), items, path)
    return _label(items, given, os.path.basename(path), classifier, failures)


def _leave_to_the_model(items: Sequence[Item]) -> Labelled:
    return Labelled([replace(item, wanted=None) for item in items], "the model's predictions", {})


def _are_classes(folders: Mapping[str, str], classifier: Classifier) -> bool:
    """Whether all pictures lie in folders of which two, at least, are called like a class."""
    known = [name for name in set(folders.values()) if name and _is_class(classifier, name)]
    return all(folders.values()) and len(known) > 1


def _is_class(classifier: Classifier, name: str) -> bool:
    try:
        classifier.find_class(name)
    except TargetError:
        return False
    return True


def _match(entries: Sequence[Entry], items: Sequence[Item], path: str) -> tuple[dict[str, str], dict[str, str]]:
    """The class of each picture, by its name, and what is wrong with lines of the table. Their paths may start beside the
    table, in the current folder, or where the pictures' names do."""
    names = {item.name: item.name for item in items}
    names |= {os.path.realpath(item.content.path): item.name for item in items if item.content.path is not None}
    beside, given, failures = os.path.dirname(os.path.abspath(path)), dict[str, str](), dict[str, str]()
    for entry in entries:
        where = f"{path}, line {entry.line}"
        shown = _relate(entry.path, beside)
        name = names.get(os.path.realpath(entry.path)) or names.get(shown) or names.get(entry.path)
        if name is None:
            failures[where] = f"{where}: {shown} is not among the images"
        elif entry.wanted is None:
            failures[where] = f"{where}: {shown} has no class"
        elif given.setdefault(name, entry.wanted) != entry.wanted:
            failures[where] = (
                f"{where}: {shown} has the class {entry.wanted} here, but {given[name]} on an earlier line, which is used"
            )
    return given, failures


def _relate(path: str, folder: str) -> str:
    """Return an absolute path as seen from the folder; a path on another drive, and any other path, as it is."""
    if os.path.isabs(path):
        with contextlib.suppress(ValueError):  # On Windows, there is no way from one drive to another.
            return os.path.relpath(path, folder).replace(os.sep, "/")
    return path


def _label(
    items: Sequence[Item], given: Mapping[str, str], source: str, classifier: Classifier, failures: dict[str, str]
) -> Labelled:
    unknown = dict(_find_unknown(given, classifier))
    failures |= {f"class {name}": reason for name, reason in unknown.items()}
    for item in items:
        if item.name not in given:
            failures[item.name] = f"{item.name}: has no label in {source}"
    known = [replace(it, wanted=given[it.name]) for it in items if it.name in given and given[it.name] not in unknown]
    if not known:
        reasons = list(failures.values())
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise InputError(f"No image has a class of the model in {source}: {reasons[0]}{more}.")
    return Labelled(known, source, failures)


def _find_unknown(given: Mapping[str, str], classifier: Classifier) -> Iterator[tuple[str, str]]:
    for name, pictures in Counter(given.values()).items():
        try:
            classifier.find_class(name)
        except TargetError as error:  # noqa: PERF203  (of this class)
            yield name, f"{pictures} image{'s' * (pictures > 1)} left out: {error}"
