"""What an output folder holds of earlier runs: whether a new one may go on there, and how it is cleared away."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gradcam.errors import GradcamError, OutputError
from gradcam.storage.disk import find_inside, is_inside, remove, remove_empty
from gradcam.storage.output import DiskShelf, Shelf, StoreShelf
from gradcam.storage.records import Record
from gradcam.storage.run_file import (
    Part,
    decode_run,
    find_parts,
    list_differences,
    list_manifests,
    list_notes,
    list_pieces,
)
from gradcam.storage.store import Store

PAGE, REPORT = "index.html", "report"  # and where a report's other files lie
# What a report is made of, below its folder.
REPORT_FILES = re.compile(
    r"style\.css|(theme|records|grid|detail|gallery)\.js|details-[0-9a-f]+/\d+\.js|views/.+\.(small|large|\d+)\.jpg",
    re.DOTALL,
)
GENERATOR = b'<meta name="generator" content="gradcam">'  # in the head of each page
HEAD = 2**16  # bytes


def check_earlier(shelf: Shelf, part: Part, now: Mapping[str, Any], mode: str) -> list[str]:
    """Notes for a person who may go on. Raises as `check_parts`, and `OutputError` for other settings."""
    names = shelf.list_names()
    parts = find_parts(names)
    if mode == "overwrite" and not part.of:
        return []  # all of it is to go
    _check_names(shelf, names, part, mode)
    others = [other for other in parts if other != part]
    for other in others[:1]:  # those that are there are alike
        _check_alike(shelf, names, other, now)
    return _check_alike(shelf, names, part, now) if part in parts and mode == "resume" else []


def check_parts(shelf: Shelf, part: Part, mode: str) -> None:
    """Raises `OutputError` where what the folder holds is in the way, whatever the settings are, and what a `Shelf` does."""
    _check_names(shelf, shelf.list_names(), part, mode)


def _check_names(shelf: Shelf, names: Collection[str], part: Part, mode: str) -> None:
    parts = find_parts(names)
    strangers = [other for other in parts if other.of != part.of]
    if strangers and not (mode == "overwrite" and not part.of):
        raise OutputError(
            f"{shelf.show()}: holds {strangers[0]}, with {_count(shelf, names, strangers)}, and this is {part}; choose "
            "another --output"
        )
    if part in parts and mode == "new":
        raise OutputError(
            f"{shelf.show()}: holds an earlier run, with {_count(shelf, names, [part])}; give --resume to go on with it, "
            "--overwrite to start anew, or another --output"
        )


def _check_alike(shelf: Shelf, names: Collection[str], part: Part, now: Mapping[str, Any]) -> list[str]:
    """Raises `OutputError` unless that part was made with the same settings."""
    if part.run not in names:
        raise OutputError(
            f"{shelf.show()}: holds {list_manifests(names, part)[0]}, but no {part.run} that says how it was made; start "
            "anew with --overwrite"
        )
    earlier = decode_run(shelf.read(part.run), shelf.show(part.run))
    differences = list_differences(earlier, now)
    if differences:
        where = f" (of {part})" if part.of else ""
        raise OutputError(
            f"{shelf.show()}: the earlier run{where} had other settings: {'; '.join(differences)}. Give the same ones, "
            "start anew with --overwrite, or choose another --output"
        )
    return list_notes(earlier, now)


def _count(shelf: Shelf, names: Collection[str], parts: Iterable[Part]) -> str:
    lines = sum(1 for part in parts for name in list_manifests(names, part) for _ in shelf.read_lines(name))
    return "1 record" if lines == 1 else f"{lines} records"


def list_recorded(shelf: Shelf, names: Collection[str], part: Part) -> Iterator[str]:
    """The files that were written and recorded, by name; lines that are no records say nothing."""
    for name in list_manifests(names, part):
        with contextlib.suppress(OutputError):  # a line without an end is none either
            for line in shelf.read_lines(name):
                with contextlib.suppress(GradcamError):
                    yield from list(Record.from_json(line).files)


def remove_part(folder: Path, part: Part, inputs: Iterable[Path] = ()) -> None:
    """Remove what a part wrote, as its manifest says, and its own files; never anything else, or out of the folder.

    The manifest goes last: whatever stops this, it can be done again. Raises `OSError`, and `OutputError`, before anything
    is removed, where one of the `inputs` would be.
    """
    names = DiskShelf(folder).list_names()
    _check_inputs(_list_outputs(folder, names, part), _keep_inside(folder, inputs))
    for path in _list_outputs(folder, names, part):
        remove(path)
    for name in (part.log, *list_pieces(names, part.events), part.run, *list_manifests(names, part)):
        remove(folder / name)
    for name in (part.events, part.records):
        remove_empty(folder / name)


def remove_report(folder: Path) -> None:
    """Remove the report, and its folders where nothing else is in them. Raises `OSError`."""
    if not (folder / REPORT).is_symlink():
        for place, _, names in os.walk(folder / REPORT, topdown=False):
            for name in names:
                path = Path(place, name)
                if REPORT_FILES.fullmatch(path.relative_to(folder / REPORT).as_posix()):
                    remove(path)
            remove_empty(Path(place))
    if not is_page_of_others(folder):
        remove(folder / PAGE)


def is_page_of_others(folder: Path) -> bool:
    """Whether the folder has an `index.html` that is no report. Raises `OSError`."""
    page = folder / PAGE
    if not page.is_file():
        return page.is_dir()
    with open(page, "rb") as file:
        head = file.read(HEAD)
    return bool(head) and GENERATOR not in head


def check_page(folder: Path) -> None:
    """Raises `OutputError` where a report would replace an `index.html` that is none, and `OSError`."""
    if is_page_of_others(folder):
        raise OutputError(
            f"{folder / PAGE}: is no report of gradcam, and one would replace it; move it away, or choose another --output"
        )


def _list_outputs(folder: Path, names: Collection[str], part: Part) -> Iterator[Path]:
    """What was written and recorded, where it lies in the folder."""
    for name in list_recorded(DiskShelf(folder), names, part):
        path = find_inside(folder, name)
        if path is not None and is_inside(folder, path):
            yield path


def _keep_inside(folder: Path, inputs: Iterable[Path]) -> set[str]:
    """All paths of inputs that lie in the folder."""
    roots = tuple(os.path.join(form(folder), "") for form in (os.path.abspath, os.path.realpath))
    forms = (form(path) for path in inputs for form in (os.path.abspath, os.path.realpath))
    return {path for path in forms if path.startswith(roots)}


def _check_inputs(outputs: Iterable[Path], inputs: Collection[str]) -> None:
    for path in outputs if inputs else ():
        if os.path.abspath(path) in inputs or os.path.realpath(path) in inputs:
            raise OutputError(
                f"{path}: is both a picture to explain and a result of the earlier run, which --overwrite would remove; "
                "choose another --output"
            )


def remove_runs(store: Store, parts: Iterable[Part], inputs: Iterable[str], *, report: bool) -> None:
    """Remove what these parts wrote, as their manifests say, and their own files; with `report` the report, too.

    The manifests go last: whatever stops this, it can be done again. `inputs`: URLs of pictures. Raises what a `Store` does,
    and `OutputError`, before anything is removed, where one of the pictures would be.
    """
    shelf, sizes, kept = StoreShelf(store), store.find(), set(inputs)
    results: list[str] = []
    own: list[str] = []
    manifests: list[str] = []
    for part in parts:
        results += sizes.keys() & set(list_recorded(shelf, sizes, part))
        own += [part.log, *list_pieces(sizes, part.events), part.run]
        manifests += list_manifests(sizes, part)
    for name in results:
        if store.below(name).url in kept:
            raise OutputError(
                f"{store.below(name).url}: is both a picture to explain and a result of the earlier run, which --overwrite "
                "would remove; choose another --output"
            )
    pages = [name for name in sizes if report and _is_of_report(store, name)]
    for names in (results, pages, [name for name in own if name in sizes], manifests):
        store.remove(names)


def check_stored_page(store: Store, names: Collection[str]) -> None:
    """Raises `OutputError` where a report would replace an `index.html` that is none, and what a `Store` does."""
    if PAGE in names and not _is_report(store):
        raise OutputError(
            f"{store.below(PAGE).url}: is no report of gradcam, and one would replace it; move it away, or choose another "
            "--output"
        )


def _is_of_report(store: Store, name: str) -> bool:
    folder, _, rest = name.partition("/")
    return (folder == REPORT and REPORT_FILES.fullmatch(rest) is not None) or (name == PAGE and _is_report(store))


def _is_report(store: Store) -> bool:
    head = store.read_range(PAGE, 0, HEAD)
    return not head or GENERATOR in head
