"""A study of methods over pictures: each picture on its own, then mosaics of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from gradcam.batch.items import Item
from gradcam.batch.reading import read_item
from gradcam.classifiers import Classifier, Prepared
from gradcam.errors import GradcamError, describe_failure
from gradcam.evaluation.study.conditions import Conditions
from gradcam.evaluation.study.entries import Entry
from gradcam.evaluation.study.journal import Journal
from gradcam.evaluation.study.judging import Judge, Step, name_mosaic
from gradcam.evaluation.study.results import Results
from gradcam.evaluation.subject import Subject

if TYPE_CHECKING:
    from gradcam.evaluation.annotations.reading import Annotations, Truth
    from gradcam.evaluation.mosaics import Mosaic

EXAMPLES = 5  # pictures whose heatmaps are kept, to be shown
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Composition:
    """A mosaic, and the SHA-256 of its pictures' own."""

    mosaic: Mosaic
    sha256: str


@dataclass(frozen=True, eq=False)
class Study:
    """All that is settled before the first picture is judged.

    `index`: the class that is explained in all pictures; None for what a list asks for, the most probable one of those
    that annotations name, or the most probable of all. `notes`: what was left out, and why.
    `kept`: heatmaps (1,H,W) of the first pictures, by name and method, as far as they were computed here.
    """

    judge: Judge
    items: Sequence[Item]
    compositions: Sequence[Composition]
    conditions: Conditions
    index: int | None = None
    annotations: Annotations | None = None
    notes: Sequence[str] = ()
    kept: dict[str, Mapping[str, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def classifier(self) -> Classifier:
        """The model, with its preprocessing."""
        return self.judge.classifier

    @property
    def maps(self) -> int:
        """How many maps are judged of each picture and mosaic."""
        return len(self.judge.plan.names)

    @property
    def total(self) -> int:
        """How many maps are judged in all."""
        return self.maps * (len(self.items) + len(self.compositions))

    def run(self, journal: Journal | None = None, *, progress: Progress | None = None) -> Iterator[Entry]:
        """What is measured of each picture, in their order, then of each mosaic; a picture that fails has an error.

        What the journal has is not computed again; the rest is added to it before it is given. `progress` is told how
        many maps are judged, and of how many.
        """
        counter = _Counter(self.total, progress)
        for number, item in enumerate(self.items, 1):
            entry = self._judge_item(item, journal, counter.step)
            counter.reach(number * self.maps)
            yield entry
        for number, composition in enumerate(self.compositions, len(self.items) + 1):
            entry = self._judge_mosaic(composition, journal, counter.step)
            counter.reach(number * self.maps)
            yield entry

    def conclude(self, entries: Sequence[Entry]) -> Results:
        """The results of all entries."""
        return Results(self.judge.plan, self.conditions, tuple(entries), tuple(self.notes))

    def choose_class(self, prepared: Prepared, name: str, wanted: int | None) -> Subject:
        """One picture and the class that is explained in it."""
        index = self.index if wanted is None else wanted
        subject = self.judge.look(prepared, index)
        annotated = () if index is not None or self.annotations is None else self.annotations.classes(name)
        if not annotated:
            return subject
        probabilities = subject.all_probabilities[0]
        return self.judge.look(prepared, max(sorted(annotated), key=lambda it: float(probabilities[it])))

    def _judge_item(self, item: Item, journal: Journal | None, step: Step) -> Entry:
        read = read_item(self.classifier, item, audit=True)
        sha256 = read.fetched.sha256
        earlier = None if journal is None else journal.find(item.name, sha256)
        if earlier is not None:
            return earlier
        if isinstance(read.picture, GradcamError):
            return _add(journal, Entry(item.name, sha256=sha256, error=str(read.picture)))
        try:
            entry = self._judge_picture(item, read.picture, sha256 or "", read.wanted, step)
        except (Exception, SystemExit) as error:  # one picture does not stop the others
            entry = Entry(item.name, sha256=sha256, error=describe_failure(item.name, error))
        return _add(journal, entry)

    def _judge_picture(self, item: Item, prepared: Prepared, sha256: str, wanted: int | None, step: Step) -> Entry:
        subject = self.choose_class(prepared, item.name, wanted)
        truth = self._find_truth(item.name, prepared, subject)
        entry, heatmaps = self.judge.judge(item.name, sha256, subject, truth, step)
        if item in self.items[:EXAMPLES]:
            self.kept[item.name] = {name: maps.cpu() for name, maps in heatmaps.items()}
        return entry

    def _find_truth(self, name: str, prepared: Prepared, subject: Subject) -> Truth | None:
        if self.annotations is None:
            return None
        height, width = prepared.reading.picture.shape[:2]
        region = self.classifier.region(height, width)
        return self.annotations.truth(name, region, subject.size[1:], int(subject.classes), picture=(height, width))

    def _judge_mosaic(self, composition: Composition, journal: Journal | None, step: Step) -> Entry:
        name = name_mosaic(composition.mosaic)
        earlier = None if journal is None else journal.find(name, composition.sha256)
        if earlier is not None:
            return earlier
        try:
            entry = self.judge.judge_mosaic(composition.mosaic, composition.sha256, step)
        except (Exception, SystemExit) as error:
            entry = Entry(name, "mosaic", composition.sha256, error=describe_failure(name, error))
        return _add(journal, entry)


@dataclass
class _Counter:
    """How many maps are judged, and somebody who wants to know."""

    total: int
    progress: Progress | None
    done: int = 0

    def step(self) -> None:
        """One more."""
        self.reach(self.done + 1)

    def reach(self, done: int) -> None:
        """So many."""
        if self.progress is not None and done != self.done:
            self.progress(done, self.total)
        self.done = done


def _add(journal: Journal | None, entry: Entry) -> Entry:
    if journal is not None:
        journal.append(entry)
    return entry
