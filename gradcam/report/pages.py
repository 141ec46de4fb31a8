"""The page: its data, the template, and the files that it is made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

from gradcam.batch.cores import count_cores
from gradcam.batch.output.earlier import PAGE, REPORT
from gradcam.records import Record
from gradcam.report.contents import Privacy, cut, to_columns, to_details
from gradcam.report.files import opening
from gradcam.report.runs import Run, read_run
from gradcam.report.views import provide_views
from gradcam.stores import Store

CHUNK = 500  # records whose details are one file: a part of a second to load, and few files for a hundred thousand
STATIC = ("style.css", "theme.js", "records.js", "grid.js", "detail.js", "gallery.js")
STORE_THREADS = 16  # each waits for the store most of the time


def write_report(place: Path | Store) -> Path | str:
    """Write `index.html` and `report/` into the output folder of a run, and give the path, or the URL, of `index.html`.

    The page is of one static folder: it opens from disk, without a server and without the network, and no path of this
    machine is in it. Views that are missing are made from the overlays, and from the input's pictures where they are still
    to be found; without them the page shows the overlays alone. The same run gives the same bytes.

    Raises `OutputError` where the folder holds no manifest, or an `index.html` that is no report, or cannot be written to;
    and `StoreError` of a store.
    """
    with opening(place) as files:
        run = read_run(files)
        files.check_page()
        with ThreadPoolExecutor(count_cores() if isinstance(place, Path) else STORE_THREADS) as pool:
            # Decoding leaves Python's lock alone.
            for _ in pool.map(lambda record: provide_views(files, record, run.root), run.records):
                pass
        _write_page(run)
    return place / PAGE if isinstance(place, Path) else place.below(PAGE).url


def _write_page(run: Run) -> None:
    files, privacy = run.files, Privacy(run)
    pieces = [_encode([to_details(run, record, privacy) for record in piece]) for piece in cut(run.records, CHUNK)]
    # Another name for other details: a page that is open, or was not written to its end, never mixes them up.
    details = "details-" + hashlib.sha256("".join(pieces).encode()).hexdigest()[:12]
    for i, piece in enumerate(pieces):
        files.write(f"{REPORT}/{details}/{i}.js", f"gradcam.receive({i}, {piece});\n".encode())
    for name in STATIC:
        files.write(f"{REPORT}/{name}", (resources.files("gradcam.report") / "static" / name).read_bytes())
    data = {"details": f"{REPORT}/{details}", "chunk": CHUNK, **to_columns(run, privacy)}
    files.write(PAGE, _render(run, data, privacy).encode())
    files.remove_details(details)


def _encode(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _render(run: Run, data: dict[str, Any], privacy: Privacy) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("gradcam.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    summary = {key: [privacy.clean_value(name) for name in names] for key, names in _summarise(run.records).items()}
    return environment.get_template("index.html.j2").render(
        title=privacy.clean(_name(run.files.place)),
        summary=summary,
        total=len(run.records),
        failures=sum(record.error is not None for record in run.records),
        facts=_list_facts(run.facts, privacy),
        data=data,
    )


def _name(place: Path | Store) -> str:
    return place.resolve().name if isinstance(place, Path) else place.name


def _summarise(records: Sequence[Record]) -> dict[str, list[str]]:
    """Which models, layers and methods there are, in the order in which they come."""
    entries = [entry for record in records for entry in record.explained]
    names = {
        "models": [record.model for record in records],
        "layers": [entry.layer for entry in entries],
        "methods": [entry.method for entry in entries],
    }
    return {key: list(dict.fromkeys(values)) for key, values in names.items()}


def _list_facts(facts: dict[str, Any], privacy: Privacy) -> list[tuple[str, list[tuple[str, str]]]]:
    """The contents of run.json for people: groups of (name, value), what belongs to no group first."""
    hidden = ("root", "schema")  # the root is a way through folders
    cleaned = privacy.clean_value({key: value for key, value in facts.items() if key not in hidden})
    alone = {key: value for key, value in cleaned.items() if not isinstance(value, dict)}
    groups = {"run": alone, **{key: value for key, value in cleaned.items() if isinstance(value, dict)}}
    return [(name, list(_flatten(group))) for name, group in groups.items() if group]


def _flatten(group: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in group.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key} ")
        else:
            yield prefix + key, _show(value)


def _show(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_show(entry) for entry in value) or "none"
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
