"""Results as files: a row for each number, a document of all, or a table for a paper."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradcam.errors import OutputError, join_names
from gradcam.evaluation.metrics import METRICS
from gradcam.evaluation.study.latex import to_latex
from gradcam.evaluation.study.results import Results
from gradcam.evaluation.study.standings import Standing, compare_methods, describe_shortage
from gradcam.files import write_whole

SCHEMA = 1


def to_csv(results: Results) -> str:
    """A row for each image, method and metric; what is the same for all rows is in columns of its own."""
    conditions = results.conditions
    constant = {
        "model": conditions.model,
        "weights_sha256": conditions.weights,
        "layer": conditions.layer,
        "score": conditions.score,
        "target": conditions.target,
        "resizing": conditions.resizing,
        "device": conditions.device,
        "precision": conditions.precision,
        "seed": conditions.seed,
        "data_sha256": results.data,
        "annotations_sha256": conditions.annotations or "",
        **conditions.versions,
    }
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "method", "metric", "value", "index", "label", *constant])
    for it in results.measurements:
        index = "" if it.index is None else it.index
        row = (it.image, it.method, it.metric, repr(it.value), index, it.label or "")
        writer.writerow([*row, *constant.values()])
    return text.getvalue()


def to_json(results: Results) -> str:
    """A document: conditions, what each method reached by each metric, every number, and what failed."""
    standings = compare_methods(results)
    shortage = describe_shortage(standings)
    found = {
        "schema": SCHEMA,
        "conditions": results.conditions.to_fields(),
        "data_sha256": results.data,
        "pictures": len(results.judged()),
        "mosaics": len(results.judged("mosaic")),
        "failures": [{"image": entry.image, "error": entry.error} for entry in results.failures],
        "notes": [*results.notes, *filter(None, [shortage])],
        "summaries": [_to_fields(standing) for standing in standings.values()],
        "measurements": [vars(measurement) for measurement in results.measurements],
    }
    return json.dumps(found, indent=1, allow_nan=False) + "\n"


def _to_fields(standing: Standing) -> dict[str, Any]:
    return {
        "method": standing.method,
        "metric": standing.metric,
        "better": METRICS[standing.metric].better,
        **standing.interval.to_fields(),
        "difference_from_best": None if standing.difference is None else standing.difference.to_fields(),
        "best": standing.is_best,
        "level_with_best": standing.is_level,
        "control": standing.is_control,
    }


FORMATS: Mapping[str, Callable[[Results], str]] = {".csv": to_csv, ".json": to_json, ".tex": to_latex}


def write_results(results: Results, path: Path) -> None:
    """Write a table, of the kind that its suffix says: `.csv`, `.json` or `.tex`. Raises `OutputError`."""
    form = FORMATS.get(path.suffix.lower())
    if form is None:
        raise OutputError(f"{path}: results are written as {join_names(FORMATS)}, or as all of these into a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, form(results).encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from error
