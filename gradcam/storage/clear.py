"""Check an output folder for earlier runs, and remove the files of earlier runs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from gradcam.errors import GradcamError, OutputError
from gradcam.options import LOOK_OPTIONS
from gradcam.storage import run_file
from gradcam.storage.disk import remove_empty
from gradcam.storage.manifest import pair_lines
from gradcam.storage.output import OutputReader, OutputWriter, to_reader, translate_output_errors
from gradcam.storage.records import Record
from gradcam.storage.run_file import ShardFiles, find_shards, list_manifests
from gradcam.storage.store import Store

ExistingRunMode = Literal["new", "resume", "overwrite"]  # How to treat an earlier run.

PAGE, REPORT = "index.html", "report"  # The page of a report, and the folder that contains the report's other files.
# Files that are the same in every report.
STATIC_FILES = ("style.css", "theme.js", "common.js", "records.js", "grid.js", "detail.js", "gallery.js")
# Matches the names of a report's files, relative to the folder REPORT.
REPORT_FILES = re.compile(
    rf"{'|'.join(map(re.escape, STATIC_FILES))}|details-[0-9a-f]+/\d+\.js|views/.+\.(small|large|\d+)\.jpg", re.DOTALL
)
GENERATOR = b'<meta name="generator" content="gradcam">'  # Each page of gradcam has this element in its head.
HEAD_BYTES = 2**16


def check_earlier_run(
    reader: OutputReader, shard: ShardFiles, current_run: Mapping[str, Any], mode: ExistingRunMode
) -> list[str]:
    """Check the folder for earlier runs, and return notes for the user if this run resumes an earlier run.

    Raises `OutputError` if an earlier run had other settings. Also raises `OutputError` if the folder contains an
    earlier run that this run can neither resume nor overwrite.
    """
    names = reader.list_names()
    shards = find_shards(names)
    if mode == "overwrite" and not shard.of:
        return []  # This run removes all earlier shards, so there are no settings to compare.
    check_other_shards(reader, names, shard, mode)
    # All existing shards have the same settings, so compare only one of the other shards.
    for other_shard in [other_shard for other_shard in shards if other_shard != shard][:1]:
        _check_same_settings(reader, names, other_shard, current_run)
    return _check_same_settings(reader, names, shard, current_run) if shard in shards and mode == "resume" else []


def check_other_shards(reader: OutputReader, names: Collection[str], shard: ShardFiles, mode: ExistingRunMode) -> None:
    """Raise `OutputError` if the folder contains an earlier run that this run can neither resume nor overwrite.

    The settings of the runs are not compared.
    """
    shards = find_shards(names)
    other_shards = [other_shard for other_shard in shards if other_shard.of != shard.of]
    if other_shards and not (mode == "overwrite" and not shard.of):
        problem = (
            f"contains {other_shards[0]}, with {_count_records(reader, names, other_shards)}, but this run is {shard}"
        )
        raise OutputError(f"{reader.show()}: {problem}; choose another --output")
    if shard in shards and mode == "new":
        problem = f"contains an earlier run, with {_count_records(reader, names, [shard])}"
        advice = "give --resume to continue it, --overwrite to start again, or another --output"
        raise OutputError(f"{reader.show()}: {problem}; {advice}")


def _check_same_settings(
    reader: OutputReader, names: Collection[str], shard: ShardFiles, current_run: Mapping[str, Any]
) -> list[str]:
    """Compare this run's settings with those of an existing shard, and return notes for the user.

    Raises `OutputError` if the settings differ, or if the shard has no run.json.
    """
    if shard.run not in names:
        problem = f"contains {list_manifests(names, shard)[0]}, but not {shard.run} with the run's settings"
        raise OutputError(f"{reader.show()}: {problem}; start again with --overwrite")
    earlier_run = _read_run(reader, names, shard)
    differences = run_file.list_differences(earlier_run, current_run)
    if differences:
        problem = f"the earlier run{f' (of {shard})' if shard.of else ''} had other settings: {'; '.join(differences)}"
        advice = "Give the same settings, start again with --overwrite, or choose another --output"
        raise OutputError(f"{reader.show()}: {problem}. {advice}")
    return run_file.list_resume_notes(earlier_run, current_run)


def _read_run(reader: OutputReader, names: Collection[str], shard: ShardFiles) -> dict[str, Any]:
    """Return the fields of the shard's run.json. If the layers and methods are missing, take them from a record.

    Earlier versions of gradcam did not write the layers and methods of models that are not classifiers.
    """
    fields = run_file.decode_run(reader.read(shard.run), reader.show(shard.run))
    # A task in the settings shows that the model is not a classifier.
    if not fields["resolved"] and "task" in fields["settings"]:
        pairs = (pair_lines(reader.read_lines(name), reader.show(name)) for name in list_manifests(names, shard))
        results = next((record.explained for _, record in chain.from_iterable(pairs) if record.explained), ())
        if results:
            fields["resolved"] = run_file.list_layers_and_methods((item.layer, item.method) for item in results)
    return fields


def list_earlier_layers(folder: Path | Store, shard: ShardFiles, mode: ExistingRunMode) -> list[str]:
    """Return the layers of the earlier run to resume, or of another shard of this run; [] if there is neither."""
    fields = _read_earlier_run(folder, shard, mode)
    layers = {**fields.get("settings", {}), **fields.get("resolved", {})}.get("layers")
    return [layer for layer in layers if isinstance(layer, str)] if isinstance(layers, list) else []


def list_earlier_look(folder: Path | Store, shard: ShardFiles, mode: ExistingRunMode) -> dict[str, Any]:
    """Return the drawing options (`LOOK_OPTIONS`) of the run to resume, or of another shard; {} if there is neither."""
    settings = _read_earlier_run(folder, shard, mode).get("settings")
    return {} if settings is None else {key: (run_file.EARLIER_LOOK | settings).get(key) for key in LOOK_OPTIONS}


def _read_earlier_run(folder: Path | Store, shard: ShardFiles, mode: ExistingRunMode) -> dict[str, Any]:
    """Return the run.json fields of the run to resume, or of another shard of this run; {} if there is neither."""
    reader = to_reader(folder)
    with translate_output_errors(folder):
        names = reader.list_names() if isinstance(folder, Store) or folder.is_dir() else []
        shards = [earlier for earlier in find_shards(names) if earlier.of == shard.of and earlier.run in names]
        runs = [earlier for earlier in shards if earlier != shard or mode == "resume"]
        return _read_run(reader, names, runs[0]) if runs else {}


def _count_records(reader: OutputReader, names: Collection[str], shards: Iterable[ShardFiles]) -> str:
    lines = sum(1 for shard in shards for name in list_manifests(names, shard) for _ in reader.read_lines(name))
    return "1 record" if lines == 1 else f"{lines} records"


def remove_runs(
    writer: OutputWriter, shards: Iterable[ShardFiles], inputs: Iterable[Path | str], *, report: bool
) -> None:
    """Remove all files of these shards, and the results that their manifests list.

    If `report` is True, also remove the report. Manifests are removed last, so that an interrupted removal can be
    repeated. If one of the `inputs` is among the results, raises `OutputError` before any file is removed.
    """
    reader = to_reader(writer.root)
    names, shard_list = reader.list_names(), list(shards)
    results = reader.select(name for shard in shard_list for name in _list_recorded(reader, names, shard))
    prefixes = tuple(os.path.join(path, "") for path in _list_path_forms(reader.locate("")))
    inputs_inside = {path for source in inputs for path in _list_path_forms(source) if path.startswith(prefixes)}
    for name in results if inputs_inside else ():
        if inputs_inside & _list_path_forms(reader.locate(name)):
            problem = "is an input image, but also a result of the earlier run, which --overwrite would remove"
            raise OutputError(f"{reader.locate(name)}: {problem}; choose another --output")
    writer.remove(results)
    if report:
        report_files = [name for name in reader.find(REPORT) if REPORT_FILES.fullmatch(name.removeprefix(f"{REPORT}/"))]
        writer.remove([*report_files, PAGE] if _has_report(reader) else report_files)
    for shard in shard_list:
        run_files = [shard.log, *run_file.list_pieces(names, shard.events), shard.run]
        writer.remove(name for name in run_files if name in names)
    writer.remove(name for shard in shard_list for name in list_manifests(names, shard))
    if isinstance(writer.root, Path):
        folders = [writer.root / name for shard in shard_list for name in (shard.events, shard.records)]
        if report and not (writer.root / REPORT).is_symlink():
            folders += [Path(folder) for folder, _, _ in os.walk(writer.root / REPORT, topdown=False)]
        for folder in folders:
            remove_empty(folder)


def _list_recorded(reader: OutputReader, names: Collection[str], shard: ShardFiles) -> Iterator[str]:
    """Yield the names of the files that the shard's records list. Skip lines that are not records."""
    for name in list_manifests(names, shard):
        with contextlib.suppress(OutputError):  # A line that is too long to be read is not a record.
            for line in reader.read_lines(name):
                with contextlib.suppress(GradcamError):
                    yield from list(Record.from_json(line).files)


def _list_path_forms(location: Path | str) -> set[str]:
    return {location} if isinstance(location, str) else {os.path.abspath(location), os.path.realpath(location)}


def check_page(reader: OutputReader) -> None:
    """Raise `OutputError` if a report would replace an `index.html` that gradcam did not write.

    Also raises `OSError` and `StoreError` if the page cannot be read.
    """
    if _has_report(reader) is False:
        problem = "is not a gradcam report, but a report would replace it"
        raise OutputError(f"{reader.locate(PAGE)}: {problem}; move it, or choose another --output")


def _has_report(reader: OutputReader) -> bool | None:
    try:
        head = reader.read_head(PAGE, HEAD_BYTES)
    except IsADirectoryError:
        return False
    return None if head is None else not head or GENERATOR in head
