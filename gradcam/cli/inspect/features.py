"""`gradcam inspect features`: write the layer outputs of many images to one file."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam._version import __version__
from gradcam.cli import _options as options
from gradcam.cli import _terminal as terminal
from gradcam.cli._commands import Command
from gradcam.cli._job import is_same_file, load_model, print_notes, print_outcome
from gradcam.cli._settings import ModelChoice, OutputMode, to_model_choice
from gradcam.errors import GradcamError, LayerError, OutputError, StoreError, escape_controls
from gradcam.options import MAX_BATCH_SIZE, MAX_WORKERS, count_cores
from gradcam.renames import FEATURES, add_old_keys
from gradcam.storage.records import SCHEMA

if TYPE_CHECKING:
    from gradcam.batch.features import Extractor, FeatureFile, Row
    from gradcam.sources.collect import InputListing

FEATURE_SUFFIXES = (".npz", ".safetensors")


def _to_path(text: str) -> Path:
    if Path(text).suffix.lower() not in FEATURE_SUFFIXES or Path(text).is_dir():
        raise GradcamError(f"'{text}' does not end in .npz or .safetensors.")
    return Path(text)


@click.command("features", cls=Command)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@options.option(
    "-o --output FILE",
    "Output file, .npz or .safetensors. An existing file is replaced.",
    _to_path,
    name="path",
    required=True,
)
@options.layers("Layers whose output is written", default="the model's default layer")
@click.option(
    "--pool", "pools", is_flag=True, help="Average each channel over the image: write arrays (N,C), not (N,C,h,w)."
)
@options.model
@options.number("--batch-size", "Batch size. If memory runs out, the batch size is halved.", maximum=MAX_BATCH_SIZE)
@options.number("--workers", "Number of threads that read images.  [default: one per core]", maximum=MAX_WORKERS)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record, and nothing else.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def features_command(inputs: tuple[str, ...], path: Path, as_json: bool, quiet: bool, **params: Any) -> int:
    """Write the layer outputs of many images to one file.

    INPUT is an image file, a folder, a glob, a list or an archive, as for `gradcam batch`. The output file has one
    array per layer, with the layer's name and one row per image. The arrays have the precision of the model, but
    bfloat16 becomes float32 in an .npz file. An .npz file has the image names in the array `names`, in the order of the
    rows. A .safetensors file has the image names as a JSON list in the metadata. Images that fail are reported and have
    no row.

    \b
      np.load("features.npz")["avgpool"]            (N,2048,1,1) for resnet50
      np.load("features.npz")["names"]              the image of each row
      safetensors.torch.load_file("features.safetensors")["avgpool"]

    100,000 images with 2048 float32 values each take 0.8 GB. While the file is written, twice as much disk space is
    needed. Only a few batches are in memory at a time. The forward pass ends at the last of the chosen layers.
    """
    output, choice = OutputMode(as_json, quiet), to_model_choice(params)
    if params["reshape"] is not None and not params["pools"]:
        raise click.UsageError("--reshape is only used with --pool: add --pool, or remove --reshape.")
    from gradcam.batch.features import FeatureFile, check_feature_file, check_layer_names, extract_items
    from gradcam.sources.collect import list_inputs

    start = time.perf_counter()
    with terminal.report_waits(output):
        listing = list_inputs(inputs)
        _refuse_input_as_output(path, [choice.weights, choice.labels, *map(Path, inputs)], listing)
        check_feature_file(path, [item.name for item in listing.items])
        extractor, batch_size = _prepare(choice, params)
        check_layer_names(path, extractor.layers)
        classifier = extractor.classifier
        print_notes(classifier.notes, output)
        with FeatureFile(path) as file:
            try:
                workers = params["workers"] or count_cores()
                results = extract_items(extractor, listing.items, batch_size=batch_size, workers=workers)
                failed = _write_rows(results, len(listing.items), file, output)
                if file.names:
                    file.write({"model": classifier.name, "precision": choice.precision, "gradcam": __version__})
            except (LayerError, OutputError, StoreError) as error:  # Every other image would fail in the same way.
                click.echo(f"Error: {escape_controls(str(error))} Nothing was written.", err=True)
                return 1
    counts = [terminal.plural(len(file.names), "image")]
    counts += [click.style(f"{failed} failed", fg="red")] if failed else []
    counts += [f"{terminal.plural(listing.left_out, 'non-image file')} left out"] if listing.left_out else []
    place = f"{click.style(classifier.name, bold=True)} on {classifier.device}"
    title = "   ".join([place, ", ".join(counts), f"{time.perf_counter() - start:.1f} s"])
    to_json = partial(_to_json, path, classifier.name, file, failed)
    print_outcome(None, to_json, partial(_format, title, path, file), output)
    return int(failed > 0)


def _to_json(path: Path, model: str, file: FeatureFile, failed: int) -> str:
    layers = {name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in file.layers.items()}
    record = {"schema": SCHEMA, "file": str(path) if file.names else None, "model": model}
    return json.dumps(add_old_keys(FEATURES, record | {"images": len(file.names), "failed": failed, "layers": layers}))


def _format(title: str, path: Path, file: FeatureFile) -> str:
    if not file.names:
        return f"{title}\nNothing was written."
    rows = [(name, " x ".join(map(str, shape)), dtype) for name, (shape, dtype) in file.layers.items()]
    lines = [f"  {line}" for line in terminal.align(rows)]
    return "\n".join([title, "", *lines, terminal.format_written_path(str(path))])


def _refuse_input_as_output(path: Path, files: list[Path | None], listing: InputListing) -> None:
    input_paths = [item.content.path for item in listing.items if item.content.path is not None]
    files += [input_path for input_path in input_paths if input_path.name == path.name]
    if any(file is not None and is_same_file(path, file) for file in files):
        raise click.UsageError(f"{path} is an input file and is never overwritten: choose another name.")


def _prepare(choice: ModelChoice, params: dict[str, Any]) -> tuple[Extractor, int]:
    """Load the model, and return the extractor and the batch size."""
    terminal.import_torch()
    from gradcam.batch.features import prepare_extractor
    from gradcam.batch.pool import choose_batch_size
    from gradcam.inspection.selection import is_pattern

    classifier = load_model(choice, layer=next((name for name in params["layers"] if not is_pattern(name)), None))
    with contextlib.redirect_stdout(sys.stderr):  # Custom models may print.
        options = {"batch_size": params["batch_size"] or choose_batch_size(classifier), "reshape": params["reshape"]}
        layers = params["layers"] or classifier.layer
        return prepare_extractor(classifier, layers, pools=params["pools"], **options), options["batch_size"]


def _write_rows(
    results: Generator[tuple[str, Row | GradcamError], None, None], total: int, file: FeatureFile, output: OutputMode
) -> int:
    """Write the features of each image, and return the number of images that failed."""
    failed = 0
    with terminal.show_progress_bar(output, "images", total) as bar, contextlib.closing(results) as rows:
        for completed, (name, row) in enumerate(rows, 1):
            if isinstance(row, GradcamError):
                failed += 1
                terminal.print_above_bar(str(row))
            else:
                file.add(name, row)
            bar.update(completed)
    return failed
