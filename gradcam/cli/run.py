"""`gradcam run`: explain one picture, or a few."""

from __future__ import annotations

import os
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from gradcam.cli import options
from gradcam.cli.terminal import Result, format_result
from gradcam.errors import GradcamError
from gradcam.naming import OutputNames, overlay_name
from gradcam.records import Explained, Prediction, Record

if TYPE_CHECKING:
    from torch import Tensor

    from gradcam.classifiers import Classifier, PictureExplanation
    from gradcam.targets import ClassTarget

LISTED = 5  # predictions
Value = TypeVar("Value")


@click.command("run")
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="IMAGE...")
@options.choices
@options.output
@options.appearance
@click.option(
    "--json", "as_json", is_flag=True, help="Print one record per picture, a line of JSON each, and nothing else."
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def run_command(images: tuple[Path, ...], as_json: bool, quiet: bool, **chosen: Any) -> int:
    """Explain pictures: write an overlay that shows where the model looked.

    Overlays are called <picture>-<method>.png, with the class and the layer in the name where there are several.
    """
    warnings.filterwarnings("ignore", module="PIL")  # about metadata that nobody asked for
    settings = options.Settings(**chosen)
    options.check_classes(settings)
    job = _prepare(settings, images)
    status = 0
    for image in images:
        result = job.explain(image)
        _print(result, as_json=as_json, quiet=quiet)
        if result.record.error is not None:
            status = 1
    return status


def _print(result: Result, *, as_json: bool, quiet: bool) -> None:
    record = result.record
    if record.error is not None:
        click.echo(record.error, err=True)
    if as_json:
        click.echo(record.to_json())
    elif not quiet and record.error is None:
        click.echo(format_result(result))


def _prepare(settings: options.Settings, images: Sequence[Path]) -> _Job:
    """Load the model and check all that was typed before the first picture is touched.

    Raises `GradcamError` and `click.UsageError`.
    """
    from gradcam.classifiers import DEFAULT, load_classifier
    from gradcam.drawing import find_colormap
    from gradcam.layers import find_layer
    from gradcam.targets import ClassTarget

    find_colormap(settings.colormap)
    classifier = load_classifier(
        settings.model or DEFAULT, weights=settings.weights, device=settings.device, precision=settings.precision
    )
    layers = _once_each(find_layer(classifier.model, layer)[0] for layer in settings.layers or (classifier.layer,))
    classes = _once_each(classifier.find_class(name) for name in settings.classes)
    methods = _once_each(settings.methods)
    results = len(images) * len(layers) * len(methods) * max(len(classes), settings.top_k)
    destination = options.find_destination(settings.output, images, results)
    return _Job(
        settings=settings,
        classifier=classifier,
        layers=layers,
        methods=methods,
        target=ClassTarget([classes] if classes else None, top=settings.top_k, score=settings.score),
        destination=destination,
        names=OutputNames(destination.folder, images),
    )


def _once_each(values: Iterable[Value]) -> list[Value]:
    return list(dict.fromkeys(values))


@dataclass(frozen=True)
class _Job:
    """What is done with each picture."""

    settings: options.Settings
    classifier: Classifier
    layers: Sequence[str]
    methods: Sequence[str]
    target: ClassTarget
    destination: options.Destination
    names: OutputNames

    def explain(self, image: Path) -> Result:
        """Explain one picture and write its overlays; whatever goes wrong is in the result."""
        start = time.perf_counter()
        try:
            found = self.classifier.compare(image, layers=self.layers, methods=self.methods, target=self.target)
            first = next(iter(found.values()))
            predictions = self._predict(first)
            explained = self._write_overlays(image, list(found.values()))
        except Exception as error:  # one broken picture does not stop the others
            return Result(Record(str(image), self.classifier.name, error=_describe(image, error)))
        return Result(
            record=Record(str(image), self.classifier.name, None, predictions, explained),
            size=first.pictures[0].shape[:2],
            region=first.regions[0],
            grids=[tuple(found[entry.layer, entry.method].maps.shape[2:]) for entry in explained],
            device=str(self.classifier.device),
            seconds=time.perf_counter() - start,
        )

    def _predict(self, explanation: PictureExplanation) -> list[Prediction]:
        values = explanation.probabilities()[0]
        if not values.isfinite().all():
            raise GradcamError("The model's output is NaN or infinite in places: look at its weights.")
        top = values.topk(min(LISTED, len(values)))
        pairs = zip(top.indices.tolist(), top.values.tolist())
        return [Prediction(index, self.classifier.labels[index], probability) for index, probability in pairs]

    def _write_overlays(self, image: Path, explanations: Sequence[PictureExplanation]) -> list[Explained]:
        from gradcam.images import write_image

        entries = [(explanation, k) for explanation in explanations for k in range(explanation.maps.shape[1])]
        if self.destination.file is not None:
            paths = [self.destination.file]
        else:
            paths = self.names.claim([self._name(image, explanation, k) for explanation, k in entries])
        _make_folder(self.destination.folder)
        for (explanation, k), path in zip(entries, paths):
            picture = explanation.overlay(0, k, alpha=self.settings.alpha, colormap=self.settings.colormap)
            write_image(path, picture)
        return [self._entry(explanation, k, path) for (explanation, k), path in zip(entries, paths)]

    def _name(self, image: Path, explanation: PictureExplanation, k: int) -> str:
        """The overlay's name; the class and the layer are in it where there are several."""
        index = _find_class(explanation, k)
        several_classes = explanation.maps.shape[1] > 1
        return overlay_name(
            image.stem,
            explanation.method,
            index=index if several_classes else None,
            label=self.classifier.labels[index] if several_classes else None,
            layer=explanation.layer if len(self.layers) > 1 else None,
        )

    def _entry(self, explanation: PictureExplanation, k: int, path: Path) -> Explained:
        index = _find_class(explanation, k)
        return Explained(
            index=index,
            label=self.classifier.labels[index],
            score=explanation.scores[0, k].item(),
            layer=explanation.layer,
            method=explanation.method,
            overlay=str(path),
            blank=not explanation.maps[0, k].any().item(),
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradcamError(f"{folder}: cannot be made a folder ({error.strerror}); choose another --output") from error


def _find_class(explanation: PictureExplanation, k: int) -> int:
    classes = cast("Tensor", explanation.classes)  # not None: a command explains classes, never a function
    return int(classes[0, k])


def _describe(image: Path, error: Exception) -> str:
    """One line that names the picture and the reason."""
    if os.environ.get("GRADCAM_TRACEBACK"):
        traceback.print_exception(error)
    reason = str(error) or type(error).__name__
    if not isinstance(error, GradcamError):
        reason = f"{type(error).__name__}: {reason} (GRADCAM_TRACEBACK=1 shows where)"
    named = reason if reason.startswith(f"{image}: ") else f"{image}: {reason}"
    return " ".join(named.split())
