"""The record of one picture, as `run --json` prints it and `batch` writes it to its manifest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, TypeVar

from gradcam.errors import GradcamError, shorten

SCHEMA = 1

Entry = TypeVar("Entry", "Prediction", "Explained")

OPTIONAL = ("heatmap", "map", "panel", "fit", "sha256", "tar")  # keys that are left out where they have no value


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
    the network saw, (top, left, height, width), which maps lie on. `fit`: how it was shown these, where not by its own
    preprocessing: "whole", or "tiles:224" for windows of so many pixels. `sha256`: of what was read, where that is asked
    for. `tar`: the one that all its files lie in, whose names then are `tar/member`.
    """

    image: str
    model: str
    error: str | None = None
    predictions: Sequence[Prediction] = field(default=())
    explained: Sequence[Explained] = field(default=())
    note: str | None = None
    size: tuple[int, int] | None = None
    region: tuple[int, int, int, int] | None = None
    fit: str | None = None
    sha256: str | None = None
    tar: str | None = None

    @property
    def status(self) -> str:
        """ "ok" or "failed"."""
        return "ok" if self.error is None else "failed"

    @property
    def files(self) -> Iterator[str]:
        """All files that were written of it, each once, as they are recorded; of what lies in a tar, the tar alone."""
        if self.tar is not None:
            yield self.tar
            return
        kinds = ((each.overlay, each.heatmap, each.map, each.panel) for each in self.explained)
        yield from dict.fromkeys(path for paths in kinds for path in paths if path is not None)

    def to_json(self) -> str:
        """One line of JSON."""
        fields: dict[str, Any] = {"schema": SCHEMA, "image": self.image, "status": self.status, "error": self.error}
        fields |= {key: value for key, value in _without_absent(asdict(self)).items() if key not in fields}
        fields["explained"] = [_without_absent(entry) for entry in fields["explained"]]
        return json.dumps(fields, allow_nan=False)

    @staticmethod
    def from_json(line: str | bytes) -> Record:
        """The record in one line, as `to_json` gives it; keys that are not known here are left out.

        Raises `GradcamError` for what is no record, and for one of another schema.
        """
        try:
            found = json.loads(line)
        except ValueError as error:
            raise GradcamError("it is no line of JSON") from error
        if not isinstance(found, dict) or "schema" not in found:
            raise GradcamError(f"it is {shorten(found)}, expected a record")
        if found["schema"] != SCHEMA:
            raise GradcamError(
                f"its schema is {shorten(found['schema'])}, and this version of gradcam knows {SCHEMA}: "
                "read it with the one that wrote it, or a newer one"
            )
        try:
            return _to_record(found)
        except (KeyError, TypeError, ValueError) as error:
            raise GradcamError(f"it is no whole record ({type(error).__name__}: {error})") from error


def _to_record(found: Mapping[str, Any]) -> Record:
    return Record(
        image=_check(found["image"], str),
        model=_check(found["model"], str),
        error=_check(found.get("error"), str, type(None)),
        predictions=tuple(_to_entry(Prediction, entry) for entry in found.get("predictions", ())),
        explained=tuple(_to_entry(Explained, entry) for entry in found.get("explained", ())),
        note=_check(found.get("note"), str, type(None)),
        size=_to_numbers(found.get("size")),
        region=_to_numbers(found.get("region")),
        fit=_check(found.get("fit"), str, type(None)),
        sha256=_check(found.get("sha256"), str, type(None)),
        tar=_check(found.get("tar"), str, type(None)),
    )


def _to_entry(kind: type[Entry], found: Mapping[str, Any]) -> Entry:
    """What is known of it; what has no value, and must have one, is a `KeyError`."""
    return kind(
        **{each.name: found[each.name] for each in fields(kind) if each.name in found or each.default is MISSING}
    )


def _to_numbers(value: Any) -> Any:
    return None if value is None else tuple(_check(number, int) for number in value)


def _check(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"{shorten(value)} is no {kinds[0].__name__}")
    return value


def _without_absent(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None or key not in OPTIONAL}
