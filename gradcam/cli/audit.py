"""`gradcam audit`: cluster the heatmaps of each class to find shortcuts that a model has learnt."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam.cli import _options as options
from gradcam.cli import _terminal as terminal
from gradcam.cli._commands import Command
from gradcam.cli._job import find_destination, is_same_file, load_model, make_folder, print_notes
from gradcam.cli._settings import OutputMode, to_model_choice
from gradcam.errors import GradcamError, escape_controls

if TYPE_CHECKING:
    from gradcam.evaluation.shortcuts.result import Audit, EvidenceCluster
    from gradcam.report.cards import Card

MAX_ROWS = 10  # number of clusters in the printed table; --json lists all clusters
MAX_PAGE_CLUSTERS = 50
MAX_LISTED_FAILURES = 10
SHEET_NAME = "audit.png"
SUSPICION_NOTE = (
    "Each cluster has a suspicion between 0 and 1. A suspicion near 1 means both: evidence at this position is rare "
    "in other classes, and evidence that looks like this is rare outside the cluster. A high suspicion is a reason to "
    "look at the images, not a proof. An audit can also miss shortcuts."
)


@click.command("audit", cls=Command, main_options=["--labels"])
@click.argument("inputs", nargs=-1, required=True, metavar="FOLDER...")
@options.option(
    "--labels TABLE|folders|predicted",
    "Source of each image's class. TABLE: a file with the columns image and class; folders: the folder names; "
    "predicted: the model's predictions.  [default: 'folders' if the folder names are class names, otherwise 'predicted']",
    name="classes",
)
@options.audit_model
@options.layer("Target layer (see `gradcam layers`).")
@options.method("gradcam")
@options.score
@options.html_page(f"{MAX_PAGE_CLUSTERS} clusters")
@options.output_option("Output folder or image file for the overview.  [default: the current folder]", default=".")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record, and nothing else.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def audit_command(inputs: tuple[str, ...], as_json: bool, quiet: bool, **params: Any) -> int:
    """Find shortcuts that a model has learnt, such as a watermark that only images of one class have.

    The heatmaps of each class are clustered. If a model has learnt a mark, such as a watermark, a frame or a caption,
    the images with this mark form a cluster. In these images, the evidence has the same position and a similar
    appearance. Other classes have no evidence at this position. The most suspicious clusters come first. An overview
    image shows each cluster with its most typical images.

    FOLDER can also be an image file, a glob, a list or an archive, as for `gradcam batch`. At least two classes are needed,
    with ten or more images each. Clustering needs scikit-learn: pip install scikit-learn. Images that cannot be read or
    have no class are reported and left out, and the exit status is 1.
    """
    output, start = OutputMode(as_json, quiet), time.perf_counter()
    terminal.import_torch()
    from gradcam.evaluation.shortcuts.audit import audit_items
    from gradcam.evaluation.shortcuts.clusters import check_installed
    from gradcam.images.write import write_image
    from gradcam.sources.collect import list_inputs

    check_installed()
    destination = find_destination(params["output"], [], 1)
    sheet = destination.file or destination.folder / SHEET_NAME
    with terminal.report_waits(output):
        items = list_inputs(inputs).items
        if any(item.content.path is not None and is_same_file(Path(item.content.path), sheet) for item in items):
            raise GradcamError(f"{sheet} is an input image and is never overwritten: choose another --output.")
        classifier = load_model(to_model_choice(params), layer=params["layer"])
        print_notes(classifier.notes, output)
        settings: Any = {name: params[name] for name in ("method", "score", "reshape")}
        with terminal.custom_code_context(params["method"]), terminal.show_pass_progress(output) as progress:
            audit = audit_items(items, classifier, labels=params["classes"], **settings, progress=progress)
    make_folder(destination.folder)
    write_image(sheet, audit.sheet())
    if params["page"]:
        _write_page(params["page"], audit)
    print_notes(audit.notes, output)
    _print_failures(audit)
    if as_json:
        click.echo(json.dumps({**audit.to_record(), "sheet": str(sheet)}, allow_nan=False))
    elif not quiet:
        seconds = time.perf_counter() - start
        files = [terminal.format_written_path(str(path)) for path in (sheet, params["page"]) if path]
        click.echo("\n".join([*_format(audit, str(classifier.device), seconds), *files, ""]))
    return int(bool(audit.failures))


def _print_failures(audit: Audit) -> None:
    reasons = list(audit.failures.values())
    for reason in reasons[:MAX_LISTED_FAILURES]:
        click.echo(escape_controls(reason), err=True)
    if len(reasons) > MAX_LISTED_FAILURES:
        click.echo(f"... and {len(reasons) - MAX_LISTED_FAILURES} more. Use --json to list them.", err=True)


def _format(audit: Audit, device: str, seconds: float) -> Iterator[str]:
    """Yield the lines of the report: the title, a table of the first clusters, and the images to look at first."""
    clusters = audit.clusters
    images = terminal.plural(sum(len(cluster.members) for cluster in clusters), "image")
    classes = terminal.plural(len({cluster.index for cluster in clusters}), "class", "classes")
    title = [f"{click.style(escape_controls(audit.model), bold=True)} on {device}"]
    title += [f"{audit.method} at {escape_controls(audit.layer)}", f"{images} of {classes}"]
    yield "   ".join([*title, terminal.plural(len(clusters), "cluster"), f"{seconds:.1f} s"])
    yield ""
    yield from _to_table("suspicion", clusters[:MAX_ROWS])
    if len(clusters) > MAX_ROWS:
        yield f"  and {len(clusters) - MAX_ROWS} more (use --json to list them)"
    yield ""
    yield "  Evidence that most images of a class share (often the object itself). High purity: the evidence looks similar."
    yield from _to_table("purity", audit.whole_class[:MAX_ROWS])
    yield ""
    first = clusters[0]
    yield f"  Most suspicious: {escape_controls(first.describe())}."
    ellipsis = ", ..." if len(first.members) > 3 else ""
    yield f"  Look at these images first: {escape_controls(', '.join(first.members[:3]))}{ellipsis}"


def _to_table(measure: str, clusters: Sequence[EvidenceCluster]) -> list[str]:
    """Format the rank of each cluster, its `measure` ("suspicion" or "purity"), its class and its position."""
    rows: list[tuple[str, ...]] = [("", measure, "class", "images", "where")]
    for rank, cluster in enumerate(clusters, 1):
        images = f"{len(cluster.members)} of {cluster.image_count}"
        where = f"{cluster.where}{' (not clustered)' if cluster.is_rest else ''}"
        rows.append((str(rank), f"{getattr(cluster, measure):.2f}", escape_controls(cluster.class_name), images, where))
    if measure == "suspicion":
        elsewhere = (f"{cluster.elsewhere} of {cluster.other_image_count}" for cluster in clusters)
        rows = [(*row, cell) for row, cell in zip(rows, ("images of other classes with evidence there", *elsewhere))]
    return [f"  {line}" for line in terminal.align(rows, right=(0,))]


def _write_page(path: Path, audit: Audit) -> None:
    from gradcam.report.cards import CardPage

    clusters = audit.clusters
    lines = [f"{audit.summary[:1].upper()}{audit.summary[1:]}.", *audit.notes, SUSPICION_NOTE]
    if len(clusters) > MAX_PAGE_CLUSTERS:
        lines.append(f"This page shows the first {MAX_PAGE_CLUSTERS} of {len(clusters)} clusters.")
    title, failures = f"Audit of {os.path.basename(audit.model)}", list(audit.failures.values())
    summary = [("Method", audit.method), ("Layer", audit.layer), ("Clusters", str(len(clusters)))]
    page = CardPage(title=title, summary=summary, lines=lines, failures=failures)
    whole_class = audit.whole_class[:MAX_ROWS]
    cards = [*map(_to_card, clusters[:MAX_PAGE_CLUSTERS]), *(_to_card(cue, ", whole class") for cue in whole_class)]
    page.write(path, cards)


def _to_card(cluster: EvidenceCluster, suffix: str = "") -> Card:
    from gradcam.report.cards import Card

    facts = [
        ("Suspicion", f"{cluster.suspicion:.2f}"),
        ("Rarity of position", f"{cluster.place:.2f}"),
        ("Rarity of appearance", f"{cluster.apart:.2f}"),
        ("Purity", f"{cluster.purity:.2f}"),
        ("Images", f"{len(cluster.members)} of {cluster.image_count}"),
        ("Images of other classes with as much evidence there", f"{cluster.elsewhere} of {cluster.other_image_count}"),
    ]
    badge = f"{cluster.where}{', not clustered' if cluster.is_rest else suffix}"
    return Card(cluster.class_name, badge, facts, cluster.draw())
