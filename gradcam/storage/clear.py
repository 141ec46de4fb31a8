"""What an output folder holds of earlier runs: whether a new one may go on there, and how it is cleared away."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from gradcam.errors import GradcamError, OutputError
from gradcam.storage import run_file
from gradcam.storage.disk import remove_empty
from gradcam.storage.manifest import pair_lines
from gradcam.storage.output import ResultWriter, RunReader, blaming, to_reader
from gradcam.storage.records import Record
from gradcam.storage.run_file import ShardFiles, find_shard_files, list_manifests
from gradcam.storage.store import Store

Mode = Literal["new", "resume", "overwrite"]  # what is done about an earlier run

PAGE, REPORT = "index.html", "report"  # and where a report's other files lie
STATIC = (
    "style.css",
    "theme.js",
    "common.js",
    "records.js",
    "grid.js",
    "detail.js",
    "gallery.js",
)  # of a report, whatever the run
# What a report is made of, below its folder.
REPORT_FILES = re.compile(
    rf"{'|'.join(map(re.escape, STATIC))}|details-[0-9a-f]+/\d+\.js|views/.+\.(small|large|\d+)\.jpg", re.DOTALL
)
GENERATOR = b'<meta name="generator" content="gradcam">'  # in the head of each page
HEAD = 2**16  # bytes


def check_earlier(reader: RunReader, part: ShardFiles, now: Mapping[str, Any], mode: Mode) -> list[str]:
    """Notes for a person who may go on. Raises as `check_parts`, and `OutputError` for other settings."""
    names = reader.list_names()
    parts = find_shard_files(names)
    if mode == "overwrite" and not part.of:
        return []  # all of it is to go
    check_parts(reader, names, part, mode)
    for other in [other for other in parts if other != part][:1]:  # those that are there are alike
        _check_alike(reader, names, other, now)
    return _check_alike(reader, names, part, now) if part in parts and mode == "resume" else []


def check_parts(reader: RunReader, names: Collection[str], part: ShardFiles, mode: Mode) -> None:
    """Raises `OutputError` where what the folder holds is in the way, whatever the settings are."""
    parts = find_shard_files(names)
    strangers = [other for other in parts if other.of != part.of]
    if strangers and not (mode == "overwrite" and not part.of):
        raise OutputError(
            f"{reader.show()}: contains {strangers[0]}, with {_count(reader, names, strangers)}, but this is {part}; "
            "choose another --output"
        )
    if part in parts and mode == "new":
        raise OutputError(
            f"{reader.show()}: contains an earlier run, with {_count(reader, names, [part])}; give --resume to continue it, "
            "--overwrite to start again, or another --output"
        )


def _check_alike(reader: RunReader, names: Collection[str], part: ShardFiles, now: Mapping[str, Any]) -> list[str]:
    """Raises `OutputError` unless that part was made with the same settings."""
    if part.run not in names:
        raise OutputError(
            f"{reader.show()}: contains {list_manifests(names, part)[0]}, but not {part.run} with the run's settings; start "
            "again with --overwrite"
        )
    earlier = _read_run(reader, names, part)
    differences = run_file.list_differences(earlier, now)
    if differences:
        where = f" (of {part})" if part.of else ""
        raise OutputError(
            f"{reader.show()}: the earlier run{where} had other settings: {'; '.join(differences)}. Give the same settings, "
            "start again with --overwrite, or choose another --output"
        )
    return run_file.list_notes(earlier, now)


def _read_run(reader: RunReader, names: Collection[str], part: ShardFiles) -> dict[str, Any]:
    """Return that part's run.json; of an earlier version, with the layers and methods of the first record's results."""
    fields = run_file.decode_run(reader.read(part.run), reader.show(part.run))
    if not fields["resolved"] and "task" in fields["settings"]:  # The settings of classifiers name both.
        pairs = (pair_lines(reader.read_lines(name), reader.show(name)) for name in list_manifests(names, part))
        results = next((record.explained for _, record in chain.from_iterable(pairs) if record.explained), ())
        fields["resolved"] = run_file.list_places((it.layer, it.method) for it in results) if results else {}
    return fields


def list_earlier_layers(place: Path | Store, part: ShardFiles, mode: Mode) -> list[str]:
    """Return the layers of the run that is resumed, or of another shard of it; none where there is neither."""
    reader = to_reader(place)
    with blaming(place):
        names = reader.list_names() if isinstance(place, Store) or place.is_dir() else []
        parts = [it for it in find_shard_files(names) if it.of == part.of and (it != part or mode == "resume")]
        fields = next((_read_run(reader, names, other) for other in parts if other.run in names), {})
    layers = {**fields.get("settings", {}), **fields.get("resolved", {})}.get("layers")
    return [layer for layer in layers if isinstance(layer, str)] if isinstance(layers, list) else []


def _count(reader: RunReader, names: Collection[str], parts: Iterable[ShardFiles]) -> str:
    lines = sum(1 for part in parts for name in list_manifests(names, part) for _ in reader.read_lines(name))
    return "1 record" if lines == 1 else f"{lines} records"


def remove_runs(
    place: ResultWriter, parts: Iterable[ShardFiles], inputs: Iterable[Path | str], *, report: bool
) -> None:
    """Remove what these parts wrote, as their manifests say, with `report` also the report; the manifests last, so that
    it can be done again. Raises `OutputError` before, where one of the `inputs` would go."""
    reader = to_reader(place.root)
    names, chosen = reader.list_names(), list(parts)
    results = reader.select(name for part in chosen for name in _list_recorded(reader, names, part))
    root = tuple(os.path.join(form, "") for form in _list_forms(reader.locate("")))
    kept = {form for each in inputs for form in _list_forms(each) if form.startswith(root)}
    for name in results if kept else ():
        if kept & _list_forms(reader.locate(name)):
            raise OutputError(
                f"{reader.locate(name)}: is an input image, but also a result of the earlier run, which --overwrite would "
                "remove; choose another --output"
            )
    own = [name for part in chosen for name in (part.log, *run_file.list_pieces(names, part.events), part.run)]
    place.remove(results)
    if report:
        files = [name for name in reader.find(REPORT) if REPORT_FILES.fullmatch(name.removeprefix(f"{REPORT}/"))]
        place.remove([*files, PAGE] if _has_report(reader) else files)
    place.remove(name for name in own if name in names)
    place.remove(name for part in chosen for name in list_manifests(names, part))
    if not isinstance(place.root, Path):
        return
    for part in chosen:
        remove_empty(place.root / part.events)
        remove_empty(place.root / part.records)
    if report and not (place.root / REPORT).is_symlink():
        for folder, _, _ in os.walk(place.root / REPORT, topdown=False):
            remove_empty(Path(folder))


def _list_recorded(reader: RunReader, names: Collection[str], part: ShardFiles) -> Iterator[str]:
    """The files that were written and recorded, by name; lines that are no records say nothing."""
    for name in list_manifests(names, part):
        with contextlib.suppress(OutputError):  # a line without an end is none either
            for line in reader.read_lines(name):
                with contextlib.suppress(GradcamError):
                    yield from list(Record.from_json(line).files)


def _list_forms(where: Path | str) -> set[str]:
    return {where} if isinstance(where, str) else {os.path.abspath(where), os.path.realpath(where)}


def check_page(reader: RunReader) -> None:
    """Raises `OutputError` where a report would replace an `index.html` that is none, and `OSError` and `StoreError`."""
    if _has_report(reader) is False:
        raise OutputError(
            f"{reader.locate(PAGE)}: is not a gradcam report, but a report would replace it; move it, or choose another "
            "--output"
        )


def _has_report(reader: RunReader) -> bool | None:
    try:
        head = reader.read_head(PAGE, HEAD)
    except IsADirectoryError:
        return False
    return None if head is None else not head or GENERATOR in head
