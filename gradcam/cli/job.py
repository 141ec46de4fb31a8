"""What commands that explain pictures share: all is checked before the first picture, and none stops the others."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from gradcam.cli.settings import Destination, Output, Settings, has_layer
from gradcam.cli.terminal import Result, format_result
from gradcam.errors import GradcamError
from gradcam.methods import METHODS
from gradcam.naming import OutputNames
from gradcam.records import Explained, Prediction, Record

if TYPE_CHECKING:
    from torch import Tensor

    from gradcam.classifiers import Classifier, PictureAttribution, PictureExplanation
    from gradcam.effort import Progress
    from gradcam.images import Pixels
    from gradcam.targets import ClassTarget

LISTED = 5  # predictions


@dataclass(frozen=True)
class Drawing:
    """One result for a picture: what it is of, how fine it is, whether there is anything on it, and how to draw it."""

    index: int
    score: float
    layer: str
    method: str
    evidence: str
    grid: tuple[int, ...]
    is_blank: bool
    draw: Callable[[], Pixels]


@dataclass(frozen=True)
class Results:
    """What was found in a picture: all of it to be drawn one by one, and maps as `compare` gives them."""

    drawings: Sequence[Drawing]
    maps: Mapping[tuple[str, str], PictureExplanation]


Write = Callable[["Job", Path, Results], list[Path]]  # draws results, and gives the path of each


@dataclass(frozen=True)
class Job:
    """What is done with each picture; `methods` make maps at layers, `attributions` say what each pixel matters."""

    settings: Settings
    classifier: Classifier
    layers: Sequence[str]
    methods: Sequence[str]
    attributions: Sequence[str]
    target: ClassTarget
    destination: Destination
    names: OutputNames

    def explain(self, image: Path, write: Write) -> Result:
        """Explain one picture and write what is to be drawn of it; whatever goes wrong is in the result."""
        start = time.perf_counter()
        try:
            maps = self._make_maps(image)
            found: list[PictureExplanation | PictureAttribution] = [*maps.values(), *self._attribute(image)]
            predictions = self._predict(found[0].output)
            drawings = [self._drawing(each, k) for each in found for k in range(each.scores.shape[1])]
            make_folder(self.destination.folder)
            paths = write(self, image, Results(drawings, maps))
        except (Exception, SystemExit) as error:  # one broken picture does not stop the others
            return Result(Record(str(image), self.classifier.name, error=_describe(image, error)))
        explained = [self._entry(drawing, path) for drawing, path in zip(drawings, paths)]
        return Result(
            record=Record(str(image), self.classifier.name, None, predictions, explained, found[0].notes[0]),
            size=found[0].pictures[0].shape[:2],
            region=found[0].regions[0],
            grids=[drawing.grid for drawing in drawings],
            device=str(self.classifier.device),
            seconds=time.perf_counter() - start,
        )

    def _make_maps(self, image: Path) -> dict[tuple[str, str], PictureExplanation]:
        if not self.methods:
            return {}
        with _show_progress(self.methods) as progress:
            return self.classifier.compare(
                image,
                layers=self.layers,
                methods=self.methods,
                target=self.target,
                evidence=self.settings.evidence,
                augmentation=self.settings.augmentation,
                smoothing=self.settings.smoothing,
                reshape=self.settings.reshape,
                progress=progress,
            )

    def _attribute(self, image: Path) -> list[PictureAttribution]:
        reshape = self.settings.reshape
        return [
            self.classifier.attribute(
                image, method, layer=layer, target=self.target, reshape=None if layer is None else reshape
            )
            for method in self.attributions
            for layer in (self.layers if has_layer(method) else [None])
        ]

    def _predict(self, output: Any) -> list[Prediction]:
        values = self.classifier.probabilities(output, 1)[0]
        if not values.isfinite().all():
            raise GradcamError("The model's output is NaN or infinite in places: look at its weights.")
        top = values.topk(min(LISTED, len(values)))
        pairs = zip(top.indices.tolist(), top.values.tolist())
        return [Prediction(index, self.classifier.label(index), probability) for index, probability in pairs]

    def _drawing(self, found: PictureExplanation | PictureAttribution, k: int) -> Drawing:
        """The k-th class's."""
        from gradcam.explanation import Explanation

        classes = cast("Tensor", found.classes)  # not None: a command explains classes, never a function
        chosen = self.settings
        if isinstance(found, Explanation):
            values, evidence = found.maps, found.evidence
            draw = partial(found.overlay, 0, k, alpha=chosen.alpha, colormap=chosen.colormap)
        else:
            values, evidence = found.values[:, :, 0], "signed"
            draw = partial(found.picture, 0, k)
        return Drawing(
            index=int(classes[0, k]),
            score=found.scores[0, k].item(),
            layer=found.layer or "input",
            method=found.method,
            evidence=evidence,
            grid=tuple(values.shape[2:]),
            is_blank=not values[0, k].any().item(),
            draw=draw,
        )

    def _entry(self, drawing: Drawing, path: Path) -> Explained:
        return Explained(
            index=drawing.index,
            label=self.classifier.label(drawing.index),
            score=drawing.score,
            layer=drawing.layer,
            method=drawing.method,
            overlay=str(path),
            blank=drawing.is_blank,
            evidence=drawing.evidence,
        )


def work(job: Job, images: Sequence[Path], write: Write, output: Output) -> int:
    """Explain the pictures one after another, print what became of each, and give the exit status."""
    status = 0
    for image in images:
        with contextlib.redirect_stdout(sys.stderr):  # whatever a model of the user's prints
            result = job.explain(image, write)
        _print(result, output)
        if result.record.error is not None:
            status = 1
    return status


def _print(result: Result, output: Output) -> None:
    record = result.record
    if record.error is not None:
        click.echo(record.error, err=True)
    if output.as_json:
        click.echo(record.to_json())
    elif not output.quiet and record.error is None:
        click.echo(format_result(result))


@contextlib.contextmanager
def _show_progress(methods: Sequence[str]) -> Iterator[Progress | None]:
    """A bar on a terminal for methods that run the model again; nobody is told otherwise."""
    if all(METHODS[name].needs for name in methods) or not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=1, file=sys.stderr, show_pos=True) as bar:

        def show(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield show


def make_folder(folder: Path) -> None:
    """Make the folder, if need be. Raises `GradcamError` where that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradcamError(f"{folder}: cannot be made a folder ({error.strerror}); choose another --output") from error


def describe_unexpected(error: BaseException) -> str:
    """The kind and the reason of an error that nobody expected, and how to see where it arose."""
    reason = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
    return f"{reason} (GRADCAM_TRACEBACK=1 shows where)"


def _describe(image: Path, error: Exception | SystemExit) -> str:
    """One line that names the picture and the reason."""
    if os.environ.get("GRADCAM_TRACEBACK"):
        traceback.print_exception(error)
    reason = str(error) if isinstance(error, GradcamError) else describe_unexpected(error)
    named = reason if reason.startswith(f"{image}: ") else f"{image}: {reason}"
    return " ".join(named.split())
