"""What was chosen for `gradcam evaluate`, and the files that its results go to."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from gradcam.cli.preparation import say
from gradcam.cli.settings import Output
from gradcam.errors import OutputError

if TYPE_CHECKING:
    from gradcam.evaluation.study.engine import Study
    from gradcam.evaluation.study.results import Results

TABLES = (".csv", ".json", ".tex")


@dataclass(frozen=True)
class StudyChoice:
    """What was chosen beside the model, as typed."""

    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    annotations: str | None
    layer: str | None
    target: str | None
    score: str
    reshape: str | tuple[int, ...] | None
    controls: bool
    limit: int | None
    seed: int
    output: str | None
    resume: bool
    overwrite: bool

    @property
    def mode(self) -> Literal["new", "resume", "overwrite"]:
        """What is done about an earlier study."""
        return "resume" if self.resume else "overwrite" if self.overwrite else "new"


@dataclass(frozen=True)
class Place:
    """Where results go: a folder, or one table in it."""

    folder: Path
    file: Path | None = None

    @property
    def journal(self) -> Path:
        """The file that a stopped study goes on with."""
        return self.folder / "journal.jsonl" if self.file is None else self.file.with_name(f"{self.file.name}.journal")

    @property
    def tables(self) -> list[Path]:
        """The tables that are written."""
        return [self.folder / f"results{suffix}" for suffix in TABLES] if self.file is None else [self.file]


def find_place(output: str) -> Place:
    """Where results go. Raises `click.UsageError` for a file of another kind than a table."""
    path = Path(output)
    if output.endswith(("/", os.sep)) or path.is_dir() or not path.suffix:
        return Place(path)
    if path.suffix.lower() not in TABLES:
        raise click.UsageError(f"{path}: results are written as {', '.join(TABLES)}, or into a folder: {path}/")
    return Place(path.parent, path)


def check_place(place: Place | None, choice: StudyChoice) -> None:
    """What can be told before torch is imported, and a model loaded. Raises `OutputError` for what is in the way."""
    from gradcam.evaluation.study.journal import check_journal

    if place is None:
        return
    if place.folder.exists() and not place.folder.is_dir():
        raise OutputError(f"{place.folder}: is a file, expected a folder for the results; choose another --output")
    check_journal(place.journal, choice.mode)
    for path in place.tables:
        if choice.mode != "overwrite" and path.exists() and not place.journal.exists():
            raise OutputError(f"{path}: is there already; give --overwrite to replace it, or another --output")


def write_all(study: Study, results: Results, place: Place, output: Output) -> Iterator[Path]:
    """Write all that belongs there, and give the path of each. Raises `GradcamError`."""
    from gradcam.evaluation.study.examples import draw_examples
    from gradcam.evaluation.study.plots import PLOTS, draw_curves, list_curves
    from gradcam.evaluation.study.writing import write_results
    from gradcam.images import write_image

    for path in place.tables:
        write_results(results, path)
        yield path
    if place.file is not None:
        return
    if list_curves(results) and importlib.util.find_spec("matplotlib") is None:
        say([f"there is no curves.png without matplotlib: {PLOTS}"], output)
    elif list_curves(results):
        write_image(place.folder / "curves.png", draw_curves(results))
        yield place.folder / "curves.png"
    write_image(place.folder / "examples.png", draw_examples(study, results))
    yield place.folder / "examples.png"
