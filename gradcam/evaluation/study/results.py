"""What a study found: the numbers of each picture, and what was the same for all methods."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradcam.errors import shorten
from gradcam.evaluation.study.conditions import Conditions
from gradcam.evaluation.study.entries import Entry, Kind
from gradcam.evaluation.study.measurements import Measurement
from gradcam.evaluation.study.plan import Plan


@dataclass(frozen=True)
class Results:
    """The entries of pictures, in their order, then those of mosaics. `notes`: what a person should know of them."""

    plan: Plan
    conditions: Conditions
    entries: Sequence[Entry] = field(repr=False)
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        return (
            f"Results({len(self.judged())} picture(s), {len(self.failures)} failed, "
            f"methods {shorten(self.plan.methods)}, metrics {shorten(self.plan.metrics)})"
        )

    @property
    def measurements(self) -> list[Measurement]:
        """One number for each image, method and metric."""
        return [measurement for entry in self.entries for measurement in entry.measurements]

    @property
    def failures(self) -> list[Entry]:
        """What could not be judged; each has an error that names it."""
        return [entry for entry in self.entries if entry.error is not None]

    @property
    def data(self) -> str:
        """The SHA-256 of the judged pictures' own, sorted: it tells the same pictures, however they are called."""
        found = sorted(entry.sha256 or "" for entry in self.judged())
        return hashlib.sha256("\n".join(found).encode()).hexdigest()

    def judged(self, kind: Kind = "picture") -> list[Entry]:
        """The entries of one kind that did not fail."""
        return [entry for entry in self.entries if entry.kind == kind and entry.error is None]

    def values(self, method: str, metric: str) -> list[float | None]:
        """One number for each entry that has numbers of this metric, None where this method has none."""
        having = [entry for entry in self.entries if any(metric in numbers for numbers in entry.values.values())]
        return [entry.values.get(method, {}).get(metric) for entry in having]

    def curves(self, method: str, metric: str) -> list[Sequence[float]]:
        """The probabilities along a metric's curve, one for each picture that has some."""
        found = (entry.curves.get(method, {}).get(metric) for entry in self.entries)
        return [curve for curve in found if curve]
