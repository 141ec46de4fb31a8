"""What `gradcam batch` does: all is checked before the first picture, and whatever ends it, what is finished is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from gradcam.cli.batch_engines import Means
from gradcam.cli.batch_settings import describe_settings
from gradcam.cli.batch_tars import check_tars, fill_tars
from gradcam.cli.interruption import Terminated
from gradcam.cli.preparation import ask, say
from gradcam.cli.progress import Display
from gradcam.cli.settings import Output, Settings
from gradcam.cli.waiting import telling_waits
from gradcam.errors import ClusterError, OutputError, StoreError

if TYPE_CHECKING:
    from gradcam.batch.engine import Engine, Work
    from gradcam.batch.failures import FailureLimit
    from gradcam.batch.inputs.shards import Shard
    from gradcam.batch.inputs.sources import Listing
    from gradcam.batch.output.outputs import Saver
    from gradcam.batch.output.results import Results
    from gradcam.batch.output.saving import Saving
    from gradcam.classifiers import Classifier
    from gradcam.stores import Store


@dataclass(frozen=True)
class BatchChoice:
    """What was chosen beside the questions that `gradcam run` has too, as typed."""

    folder: Path | Store
    saved: tuple[str, ...]
    format: str
    quality: int
    output_format: str
    batch_size: int | None
    workers: int | None
    resume: bool
    overwrite: bool
    report: bool
    limit: FailureLimit | None
    shard: Shard | None
    audit: bool
    engine: str
    address: str | None
    actors_per_gpu: int

    @property
    def mode(self) -> Literal["new", "resume", "overwrite"]:
        """What is done about an earlier run."""
        return "resume" if self.resume else "overwrite" if self.overwrite else "new"

    @property
    def in_tars(self) -> bool:
        """Whether results are a WebDataset."""
        return self.output_format == "webdataset"


@dataclass(frozen=True)
class Typed:
    """All that was typed: of which pictures, what is asked, how they are worked on, and how it is told."""

    inputs: Sequence[str]
    settings: Settings
    choice: BatchChoice
    output: Output


def explain_all(typed: Typed) -> int:
    """Explain the pictures, say what became of them, and give the exit status.

    Raises `GradcamError` and `click.UsageError`, both before the first picture.
    """
    with telling_waits(typed.output), contextlib.closing(Means(typed)) as means:
        return _explain_all(typed, means)


def _explain_all(typed: Typed, means: Means) -> int:
    from gradcam.batch.inputs.sources import list_inputs
    from gradcam.batch.output.collisions import check_outputs, check_panel
    from gradcam.batch.output.earlier_classes import check_classes
    from gradcam.batch.output.names import plan_stems
    from gradcam.batch.output.opening import check_output

    choice = typed.choice
    # Before torch is imported, and a model loaded.
    check_output(choice.folder, choice.mode, choice.shard, report=choice.report)
    if choice.in_tars:
        check_tars(choice.folder, choice.mode, choice.shard)
    listing = list_inputs(typed.inputs, exclude=choice.folder)
    work = _find_work(typed, listing, means)
    if choice.resume:
        check_classes(choice.folder, work.items, work.classifier)
    saving, stems = _to_saving(typed), plan_stems(listing.items)
    if choice.in_tars:  # where no name can be another's, or an input's
        check_panel(saving, work.question)
    else:
        check_outputs(
            choice.folder,
            listing.items,
            stems,
            saving=saving,
            question=work.question,
            labels=work.classifier.labels,
        )
    with contextlib.closing(_open_results(typed, listing, work, saving, stems)) as results:
        say(results.notes, typed.output)
        saver = _to_saver(results, stems, saving, work)
        return _Run(results, saver, work, typed, means.engine).explain(listing.left_out)


def _find_work(typed: Typed, listing: Listing, means: Means) -> Work:
    """The model, and the pictures of this share."""
    from gradcam.batch.batches import choose_batch_size
    from gradcam.batch.cores import count_cores
    from gradcam.batch.engine import Work

    choice = typed.choice
    means.start()
    classifier, question = ask(means.to_settings(), typed.output)
    _check_listed_classes(classifier, listing, typed.settings)
    return Work(
        classifier=classifier,
        question=question,
        items=[item for item in listing.items if choice.shard is None or choice.shard.takes(item.name)],
        batch_size=choice.batch_size or choose_batch_size(classifier, means.device),
        workers=choice.workers or count_cores(),
        device=means.device,
        audit=choice.audit,
    )


def _check_listed_classes(classifier: Classifier, listing: Listing, settings: Settings) -> None:
    """Raises `click.UsageError` where options say which classes as well, and `GradcamError` for one that there is not."""
    wanted = dict.fromkeys(item.wanted for item in listing.items if item.wanted is not None)
    if listing.has_classes and (settings.classes or settings.top_k > 1):
        raise click.UsageError("The list says which classes to explain, and so do --class or --top-k: leave those out.")
    for name in wanted:
        classifier.find_class(name)


def _to_saving(typed: Typed) -> Saving:
    from gradcam.batch.output.saving import Saving

    settings, choice = typed.settings, typed.choice
    kinds = tuple(dict.fromkeys(choice.saved))
    return Saving(kinds, choice.format, choice.quality, settings.alpha, settings.colormap, views=choice.report)


def _open_results(typed: Typed, listing: Listing, work: Work, saving: Saving, stems: dict[str, str]) -> Results:
    from gradcam.batch.output.opening import open_results
    from gradcam.batch.output.run_file import Run, describe_root
    from gradcam.batch.weights import describe_weights

    settings, choice = typed.settings, typed.choice
    ours = {"listed_classes": listing.has_classes, "output_format": choice.output_format}
    run = Run(
        device=str(work.device or work.classifier.device),
        model=work.classifier.name,
        weights=describe_weights(work.classifier, settings.model.weights),
        settings=describe_settings(settings, work, saving) | ours,
        inputs=list(typed.inputs),
        root=describe_root(listing.root, choice.folder),
        pictures=len(work.items),
        left_out=listing.left_out,
    )
    results = open_results(choice.folder, run, listing, mode=choice.mode, shard=choice.shard, stems=stems)
    return fill_tars(results, choice.folder, choice.mode, choice.shard, stems) if choice.in_tars else results


def _to_saver(results: Results, stems: dict[str, str], saving: Saving, work: Work) -> Saver:
    from gradcam.batch.output.outputs import Saver
    from gradcam.report import draw_views

    return Saver(
        place=results.place,
        stems=stems,
        saving=saving,
        classifier=work.classifier,
        question=work.question,
        draw_views=draw_views,
    )


@dataclass(frozen=True)
class _Run:
    """Pictures on their way to open results."""

    results: Results
    saver: Saver
    work: Work
    typed: Typed
    engine: Engine

    def explain(self, left_out: int) -> int:
        """Explain the pictures, say what became of them, and give the exit status."""
        from gradcam.batch.failures import TooManyFailuresError

        names = [item.name for item in self.work.items]
        display = Display(self.typed.output, len(names), sum(name in self.results.done for name in names))
        try:
            self._go_through(display)
            self.results.close(names)
            report = self._report()
        except (OutputError, StoreError, ClusterError, TooManyFailuresError) as error:
            display.tell_failures(self.results.manifest)
            self._stop(display, str(error))
            return 1
        except (KeyboardInterrupt, Terminated):
            self._stop(display, "Stopped.")
            raise
        display.tell_failures(self.results.manifest)
        display.tell_end(str(self.typed.choice.folder), left_out=left_out, report=report)
        return int(display.has_failures)

    def _stop(self, display: Display, reason: str) -> None:
        """What is finished is kept before it is counted; first of all the reason, as a store may need a while."""
        display.tell_reason(reason)
        with contextlib.suppress(OutputError, StoreError):  # of the same place, about which all is said
            self.results.close()
        display.tell_stop(self.results.recorded)

    def _go_through(self, display: Display) -> None:
        from gradcam.batch.engine import explain_into

        limit = self.typed.choice.limit
        records = explain_into(self.results, self.saver, self.work, limit, engine=self.engine)
        # Closed here: the error that ends it would keep its threads at work after the folder is another's.
        with contextlib.closing(records), display.shown():
            for record in records:
                display.add(record)

    def _report(self) -> str | None:
        from gradcam.report import write_report

        return str(write_report(self.typed.choice.folder)) if self.typed.choice.report else None
