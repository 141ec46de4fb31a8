"""What was measured of one picture or mosaic, as one line of a study's journal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from gradcam.errors import GradcamError, shorten, show_fields
from gradcam.evaluation.study.measurements import Measurement

Kind = Literal["picture", "mosaic"]
Values = Mapping[str, Mapping[str, float]]  # by method and metric
Curves = Mapping[str, Mapping[str, Sequence[float]]]  # by method and metric, probabilities at equal distances


@dataclass(frozen=True)
class Entry:
    """What was measured of one image by all methods; one that failed has an error, and nothing measured.

    `sha256`: of the file, None where it could not be read; of a mosaic, of its pictures'. `index`, `label`,
    `probability`: of the class that was explained; a mosaic has four, and only their labels are here.
    """

    image: str
    kind: Kind = "picture"

    __repr__ = show_fields
    sha256: str | None = None
    error: str | None = None
    index: int | None = None
    label: str | None = None
    probability: float | None = None
    values: Values = field(default_factory=dict)
    curves: Curves = field(default_factory=dict)

    @property
    def measurements(self) -> list[Measurement]:
        """The numbers one by one."""
        return [
            Measurement(self.image, method, metric, value, self.index, self.label)
            for method, numbers in self.values.items()
            for metric, value in numbers.items()
        ]

    def to_json(self) -> str:
        """One line; its numbers are read back to the last digit."""
        return json.dumps(asdict(self), allow_nan=False)

    @staticmethod
    def from_json(line: str | bytes) -> Entry:
        """The entry in one line, as `to_json` gives it; keys that are not known here are left out.

        Raises `GradcamError` for what is no entry.
        """
        try:
            found = json.loads(line)
            entry = Entry(**{each.name: found[each.name] for each in fields(Entry)})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise GradcamError(f"it is no whole entry of a study ({type(error).__name__}: {error})") from error
        if not isinstance(entry.image, str) or not _is_table(entry.values) or not _is_table(entry.curves):
            raise GradcamError(f"it is {shorten(found)}, expected an entry of a study")
        return entry


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(row, dict) for row in value.values())
