"""`gradcam inspect features`: write the layer outputs of many images to one file."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradcam._version import __version__
from gradcam.cli import _options as options
from gradcam.cli._commands import Command
from gradcam.cli._job import is_same_file, load_model, print_notes, print_outcome
from gradcam.cli._settings import ModelChoice, OutputMode, to_model_choice
from gradcam.cli._terminal import (
    format_written_path,
    import_torch,
    plural,
    print_above_bar,
    report_waits,
    show_progress_bar,
)
from gradcam.errors import GradcamError, LayerError, OutputError, StoreError, escape_controls
from gradcam.options import MAX_BATCH_SIZE, MAX_WORKERS
from gradcam.renames import FEATURES, add_old_keys
from gradcam.storage.records import SCHEMA

if TYPE_CHECKING:
    from gradcam.batch.features import Extractor, FeatureFile
    from gradcam.sources.collect import InputListing

FEATURE_SUFFIXES = (".npz", ".safetensors")


@dataclass(frozen=True)
class FeaturesOutcome:
    """The result of a run.

    There is no file if all images failed. `layers`: the shape and dtype of each layer's array, whose first axis is the
    image. `left_out`: the number of files that are not images.
    """

    path: Path
    model: str
    device: str
    layers: Mapping[str, tuple[tuple[int, ...], str]]
    images: int
    failed: int
    left_out: int
    seconds: float

    def to_json(self) -> str:
        layers = {name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in self.layers.items()}
        record = {"schema": SCHEMA, "file": str(self.path) if self.images else None, "model": self.model}
        return json.dumps(
            add_old_keys(FEATURES, record | {"images": self.images, "failed": self.failed, "layers": layers})
        )

    def format(self) -> str:
        parts = [plural(self.images, "image")]
        if self.failed:
            parts.append(click.style(f"{self.failed} failed", fg="red"))
        if self.left_out:
            parts.append(f"{plural(self.left_out, 'non-image file')} left out")
        title = [f"{click.style(self.model, bold=True)} on {self.device}", ", ".join(parts), f"{self.seconds:.1f} s"]
        if not self.images:
            return "\n".join(["   ".join(title), "Nothing was written."])
        shapes = {name: " x ".join(map(str, shape)) for name, (shape, _) in self.layers.items()}
        first, second = max(map(len, shapes)), max(map(len, shapes.values()))
        rows = [f"  {name:<{first}}   {shapes[name]:<{second}}   {dtype}" for name, (_, dtype) in self.layers.items()]
        return "\n".join(["   ".join(title), "", *rows, format_written_path(str(self.path))])


@dataclass(frozen=True)
class _FeatureSettings:
    inputs: tuple[str, ...]
    model: ModelChoice
    layers: tuple[str, ...]
    pools: bool
    reshape: str | tuple[int, ...] | None
    path: Path
    batch_size: int | None
    workers: int | None
    output: OutputMode


def _to_path(context: click.Context, parameter: click.Parameter, path: Path) -> Path:
    if path.suffix.lower() not in FEATURE_SUFFIXES or path.is_dir():
        raise click.BadParameter(f"'{path}' does not end in .npz or .safetensors.", context, parameter)
    return path


@click.command("features", cls=Command)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@options.option(
    "-o --output FILE",
    "Output file, .npz or .safetensors. An existing file is replaced.",
    click.Path(path_type=Path),
    name="path",
    required=True,
    callback=_to_path,
)
@options.layers("Layers whose output is written", default="the model's default layer")
@click.option(
    "--pool", "pools", is_flag=True, help="Average each channel over the image, to arrays (N,C) instead of (N,C,h,w)."
)
@options.model
@options.number("--batch-size", "Batch size. It is halved if memory runs out.", maximum=MAX_BATCH_SIZE)
@options.number("--workers", "Number of threads that read images.  [default: one per core]", maximum=MAX_WORKERS)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON record, and nothing else.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def features_command(inputs: tuple[str, ...], as_json: bool, quiet: bool, **params: Any) -> int:
    """Write the layer outputs of many images to one file.

    INPUT is an image file, a folder, a glob, a list or an archive, as for `gradcam batch`. The output file has one array
    per layer, with the layer's name and one row per image. The arrays have the precision of the model, but bfloat16 becomes
    float32 in an .npz file. An .npz file has the image names in the array `names`, in the order of the rows. A .safetensors
    file has them as a JSON list in its metadata. Images that fail are reported and have no row.

    \b
      np.load("features.npz")["avgpool"]            (N,2048,1,1) for resnet50
      np.load("features.npz")["names"]              the image of each row
      safetensors.torch.load_file("features.safetensors")["avgpool"]

    100,000 images with 2048 float32 values each take 0.8 GB. While the file is written, it needs twice as much disk space.
    Only a few batches are in memory at a time. The forward pass ends at the last of the chosen layers.
    """
    selected = {name: params[name] for name in ("layers", "pools", "reshape", "path", "batch_size", "workers")}
    settings = _FeatureSettings(
        inputs=inputs, model=to_model_choice(params), output=OutputMode(as_json, quiet), **selected
    )
    if settings.reshape is not None and not settings.pools:
        raise click.UsageError("--reshape is only used with --pool: add --pool, or remove --reshape.")
    from gradcam.batch.features import FeatureFile, check_feature_file, check_layer_names
    from gradcam.sources.collect import list_inputs

    start = time.perf_counter()
    with report_waits(settings.output):
        listing = list_inputs(settings.inputs)
        _refuse_input_as_output(settings, listing)
        check_feature_file(settings.path, [item.name for item in listing.items])
        extractor = _prepare(settings)
        check_layer_names(settings.path, extractor.layers)
        classifier = extractor.classifier
        print_notes(classifier.notes, settings.output)
        with FeatureFile(settings.path) as file:
            try:
                failed = _write_rows(settings, listing, extractor, file)
                if file.names:
                    file.write(
                        {"model": classifier.name, "precision": settings.model.precision, "gradcam": __version__}
                    )
            except (LayerError, OutputError, StoreError) as error:  # Every other image would fail in the same way.
                click.echo(f"Error: {escape_controls(str(error))} Nothing was written.", err=True)
                return 1
    seconds, written_count = time.perf_counter() - start, len(file.names)
    device = str(classifier.device)
    outcome = FeaturesOutcome(
        settings.path, classifier.name, device, file.layers, written_count, failed, listing.left_out, seconds
    )
    print_outcome(None, outcome.to_json, outcome.format, settings.output)
    return int(failed > 0)


def _refuse_input_as_output(settings: _FeatureSettings, listing: InputListing) -> None:
    input_paths = [item.content.path for item in listing.items if item.content.path is not None]
    files = [settings.model.weights, settings.model.labels, *map(Path, settings.inputs)]
    files += [path for path in input_paths if path.name == settings.path.name]
    if any(path is not None and is_same_file(settings.path, path) for path in files):
        raise click.UsageError(f"{settings.path} is an input file and is never overwritten: choose another name.")


def _prepare(settings: _FeatureSettings) -> Extractor:
    import_torch()
    from gradcam.batch.features import prepare_extractor
    from gradcam.batch.pool import choose_batch_size
    from gradcam.inspection.selection import is_pattern

    layer_name = next((name for name in settings.layers if not is_pattern(name)), None)
    classifier = load_model(settings.model, layer=layer_name)
    with contextlib.redirect_stdout(sys.stderr):  # Custom models may print.
        size, layers = settings.batch_size or choose_batch_size(classifier), settings.layers or classifier.layer
        return prepare_extractor(classifier, layers, pools=settings.pools, reshape=settings.reshape, batch_size=size)


def _write_rows(settings: _FeatureSettings, listing: InputListing, extractor: Extractor, file: FeatureFile) -> int:
    from gradcam.batch.features import extract_items
    from gradcam.batch.pool import choose_batch_size
    from gradcam.options import count_cores

    failed = 0
    size = settings.batch_size or choose_batch_size(extractor.classifier)
    generator = extract_items(extractor, listing.items, batch_size=size, workers=settings.workers or count_cores())
    with show_progress_bar(settings.output, "images", len(listing.items)) as bar, contextlib.closing(generator) as rows:
        for completed, (name, row) in enumerate(rows, 1):
            if isinstance(row, GradcamError):
                failed += 1
                print_above_bar(str(row))
            else:
                file.add(name, row)
            bar.update(completed)
    return failed
