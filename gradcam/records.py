"""The record of one picture, as `run --json` prints it and `batch` writes it to its manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1


OPTIONAL = ("heatmap", "map", "panel", "sha256")  # keys that are left out where they have no value


@dataclass(frozen=True)
class Prediction:
    """One of the classes that the model finds most probable."""

    index: int
    label: str | None
    probability: float


@dataclass(frozen=True)
class Explained:
    """One result: the class, its score, the layer, the method and the kind of evidence; `blank` where there was none.

    `overlay`, `heatmap`, `map`, `panel`: the files that were written of it; a panel may be of several results.
    """

    index: int
    label: str | None
    score: float
    layer: str
    method: str
    overlay: str | None
    blank: bool
    evidence: str = "positive"
    heatmap: str | None = None
    map: str | None = None
    panel: str | None = None


@dataclass(frozen=True)
class Record:
    """What became of one picture. A picture that failed has an error, and nothing explained.

    `note`: what a person should know of how the picture is shown. `size`: its (height, width). `region`: the pixels that
    the network saw, (top, left, height, width), which maps lie on. `sha256`: of what was read, where that is asked for.
    """

    image: str
    model: str
    error: str | None = None
    predictions: Sequence[Prediction] = field(default=())
    explained: Sequence[Explained] = field(default=())
    note: str | None = None
    size: tuple[int, int] | None = None
    region: tuple[int, int, int, int] | None = None
    sha256: str | None = None

    @property
    def status(self) -> str:
        """ "ok" or "failed"."""
        return "ok" if self.error is None else "failed"

    def to_json(self) -> str:
        """One line of JSON."""
        fields: dict[str, Any] = {"schema": SCHEMA, "image": self.image, "status": self.status, "error": self.error}
        fields |= {key: value for key, value in _without_absent(asdict(self)).items() if key not in fields}
        fields["explained"] = [_without_absent(entry) for entry in fields["explained"]]
        return json.dumps(fields, allow_nan=False)


def _without_absent(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None or key not in OPTIONAL}
