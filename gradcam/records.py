"""The record of one picture, as `run --json` prints it and `batch` writes it to its manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class Prediction:
    """One of the classes that the model finds most probable."""

    index: int
    label: str | None
    probability: float


@dataclass(frozen=True)
class Explained:
    """One overlay: the class, its score, the layer, the method and the kind of evidence; `blank` where there was none."""

    index: int
    label: str | None
    score: float
    layer: str
    method: str
    overlay: str
    blank: bool
    evidence: str = "positive"


@dataclass(frozen=True)
class Record:
    """What became of one picture. A picture that failed has an error, and nothing explained.

    `note`: what a person should know of how the picture is shown.
    """

    image: str
    model: str
    error: str | None = None
    predictions: Sequence[Prediction] = field(default=())
    explained: Sequence[Explained] = field(default=())
    note: str | None = None

    @property
    def status(self) -> str:
        """ "ok" or "failed"."""
        return "ok" if self.error is None else "failed"

    def to_json(self) -> str:
        """One line of JSON."""
        fields: dict[str, Any] = {"schema": SCHEMA, "image": self.image, "status": self.status, "error": self.error}
        fields |= {key: value for key, value in asdict(self).items() if key not in fields}
        return json.dumps(fields, allow_nan=False)
