"""What commands that explain pictures share: all is checked before the first picture, and none stops the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradcam.attributions import ATTRIBUTIONS
from gradcam.cli.outcomes import tell_each
from gradcam.cli.progress import shown_passes
from gradcam.cli.settings import Destination, Output, Settings
from gradcam.cli.terminal import Result
from gradcam.errors import GradcamError
from gradcam.methods import METHODS
from gradcam.naming import OutputNames
from gradcam.records import Record

if TYPE_CHECKING:
    from gradcam.batch.findings import Finding, Question
    from gradcam.classifiers import Classifier


# Writes what was found, and gives the file of each kind of `choices.SAVED` for each drawing.
Write = Callable[["Job", Path, "Finding"], Sequence[Mapping[str, Path]]]


@dataclass(frozen=True)
class Job:
    """What is done with each picture."""

    settings: Settings
    classifier: Classifier
    question: Question
    destination: Destination
    names: OutputNames

    def explain(self, image: Path, write: Write, output: Output) -> Result:
        """Explain one picture and write what is to be drawn of it."""
        start = time.perf_counter()
        found = self._find(image, output)
        make_folder(self.destination.folder)
        written = write(self, image, found)
        size: tuple[int, int] = found.picture.shape[:2]
        label = self.classifier.label
        entries = [drawing.to_entry(label(drawing.index)) for drawing in found.drawings]
        files: list[dict[str, Any]] = [{kind: str(path) for kind, path in each.items()} for each in written]
        explained = [replace(entry, **each) for entry, each in zip(entries, files)]
        return Result(
            record=Record(
                str(image),
                self.classifier.name,
                predictions=found.predictions,
                explained=explained,
                note=found.note,
                size=size,
                region=found.region,
                fit=found.fit,
            ),
            grids=[drawing.grid for drawing in found.drawings],
            device=str(self.classifier.device),
            seconds=time.perf_counter() - start,
        )

    def _find(self, image: Path, output: Output) -> Finding:
        from gradcam.batch.findings import find

        many = [name for name in self.question.methods if not METHODS[name].needs]
        many += [name for name in self.question.attributions if ATTRIBUTIONS[name].has_progress]
        with shown_passes(output, wanted=bool(many) or self.classifier.fit != "crop") as progress:
            (found,) = find(self.classifier, self.question, [self.classifier.prepare(image)], progress=progress)
        if isinstance(found, GradcamError):
            raise found
        return found


def work(job: Job, images: Sequence[Path], write: Write, output: Output) -> int:
    """Explain the pictures one after another, print what became of each, and give the exit status."""
    name = job.classifier.name
    return tell_each(
        images,
        lambda image: job.explain(image, write, output),
        lambda image, error: Result(Record(image, name, error=error)),
        output,
    )


def make_folder(folder: Path) -> None:
    """Make the folder, if need be. Raises `GradcamError` where that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradcamError(f"{folder}: cannot be made a folder ({error.strerror}); choose another --output") from error
