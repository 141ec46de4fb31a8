"""Find the class of each image: from a table, from the name of its folder, or from the model's prediction."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from gradcam.errors import InputError, TargetError
from gradcam.models.classifier import Classifier
from gradcam.sources.contents import InputImage
from gradcam.sources.list_files import LIST_SUFFIXES, read_list

FOLDERS, PREDICTED = "folders", "predicted"
Labels = str | os.PathLike[str] | Mapping[str, str]


def find_labels(
    labels: Labels | None, items: Sequence[InputImage], classifier: Classifier
) -> tuple[Sequence[InputImage], str, dict[str, str]]:
    """Find the class of each image. Raise `InputError` if the labels cannot be read, or if no image has a class.

    Return three values: the images that have a class, the origin of the classes (for messages), and the failures. The
    failures give the reason for each image, table line or class that is left out. In the returned images, `wanted` is
    the class, or None if the model's prediction is used.
    """
    folders = {item.name: PurePosixPath(item.name).parent.name for item in items}
    failures: dict[str, str] = {}
    if labels == PREDICTED or (labels is None and not _are_classes(folders, classifier)):
        return [replace(item, wanted=None) for item in items], "the model's predictions", failures
    if isinstance(labels, Mapping):
        classes, source = labels, "the labels given"
    elif labels is None or labels == FOLDERS:
        classes, source = {name: folder for name, folder in folders.items() if folder}, "the folders' names"
    else:
        classes, failures = _read_table(os.fspath(labels), items)
        source = os.path.basename(labels)
    unknown = dict(_find_unknown(classes, classifier))
    failures |= {f"class {name}": reason for name, reason in unknown.items()}
    failures |= {item.name: f"{item.name}: there is no label in {source}" for item in items if item.name not in classes}
    labelled = [replace(item, wanted=classes[item.name]) for item in items if item.name in classes]
    labelled = [item for item in labelled if item.wanted not in unknown]
    if not labelled:
        reasons = list(failures.values())
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        raise InputError(f"No image has a valid class in {source}: {reasons[0]}{more}.")
    return labelled, source, failures


def _are_classes(folders: Mapping[str, str], classifier: Classifier) -> bool:
    """Return True if all images are in folders, and at least two folders are named like a class."""
    names = set(folders.values())
    return all(names) and len(names - dict(_find_unknown(folders, classifier)).keys()) > 1


def _read_table(path: str, items: Sequence[InputImage]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the class of each image by name, and the problems in the table by line.

    Paths in the table may be relative to the table, to the current folder, or to the folder of the image names.
    """
    if not path.lower().endswith(LIST_SUFFIXES):
        raise InputError(
            f"{path}: expected a table ({', '.join(LIST_SUFFIXES)}) with the columns image and class. Instead of a "
            f"table, you can give the word {FOLDERS} or {PREDICTED}."
        )
    names = {item.name: item.name for item in items}
    names |= {os.path.realpath(item.content.path): item.name for item in items if item.content.path is not None}
    table_folder, labels, failures = os.path.dirname(os.path.abspath(path)), dict[str, str](), dict[str, str]()
    for entry in read_list(os.path.abspath(path)):
        location = f"{path}, line {entry.line}"
        display_path = _relate(entry.path, table_folder)
        subject = f"{location}: {display_path}"
        name = names.get(os.path.realpath(entry.path)) or names.get(display_path) or names.get(entry.path)
        if name is None:
            failures[location] = f"{subject} is not among the images"
        elif entry.wanted is None:
            failures[location] = f"{subject} has no class"
        elif labels.setdefault(name, entry.wanted) != entry.wanted:
            used = f"the class {labels[name]} of an earlier line is used"
            failures[location] = f"{subject} has the class {entry.wanted} on this line, but {used}"
    return labels, failures


def _relate(path: str, folder: str) -> str:
    """Make an absolute path relative to `folder`. Return paths on other drives, and relative paths, unchanged."""
    if os.path.isabs(path):
        with contextlib.suppress(ValueError):  # `relpath` fails for two drives on Windows.
            return os.path.relpath(path, folder).replace(os.sep, "/")
    return path


def _find_unknown(labels: Mapping[str, str], classifier: Classifier) -> Iterator[tuple[str, str]]:
    for name, count in Counter(labels.values()).items():
        try:
            classifier.find_class(name)
        except TargetError as error:  # noqa: PERF203  (Each class fails by itself.)
            yield name, f"{count} image{'s' * (count > 1)} left out: {error}"
