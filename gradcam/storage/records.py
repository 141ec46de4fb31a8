"""The record of one picture, as `run --json` prints it and `batch` writes it to its manifest."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import PurePath
from typing import Any, TypeVar

from gradcam.errors import GradcamError, shorten, show_fields
from gradcam.models.labels import name_class

SCHEMA = 1

Entry = TypeVar("Entry", "Prediction", "Explained")

# Keys that are left out where they have no value
OPTIONAL = (
    *("heatmap", "map", "panel", "fit", "sha256", "tar", "page", "edits"),
    *("box", "point", "number", "edge", "missed", "mask", "text", "against", "like", "on", "word", "keypoint", "axis"),
)

Box = tuple[float, float, float, float]  # left, top, right and bottom, in pixels of the picture
Point = tuple[float, float]  # across and down


@dataclass(frozen=True)
class Prediction:
    """One of the classes that the model finds most probable; or one of the things that it found: a box, a class with its
    share of the picture's pixels, a word of a caption, a keypoint. `number`: which box, word or keypoint it is. `box`,
    `point`: where it is."""

    index: int
    label: str | None
    probability: float
    number: int | None = None
    box: Box | None = None
    point: Point | None = None


@dataclass(frozen=True)
class Explained:
    """One result: the class, its score, the layer, the method and the kind of evidence; `blank` where there was none.
    Of a function of the user's in place of a class, the `index` is None and the `label` the function's name. `overlay`,
    `heatmap`, `map`, `panel`: the files that were written of it; a panel may be of several results.

    Of other things than classes: `box`, where it is; `number`, which of the boxes; `edge`, which of that box's edges is
    explained; `missed`, that nothing was found there; `mask`, how it was named; `text`, the sentence, and `against`, those
    that it is contrasted with; `like`, the other picture, and `on`, "reference" for the map on that one; `word`, which
    word of the caption; `keypoint`, which of these, `point`, where it is, and `axis`, which of its coordinates is
    explained."""

    index: int | None
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
    box: Box | None = None
    point: Point | None = None
    number: int | None = None
    edge: str | None = None
    missed: bool | None = None
    mask: str | None = None
    text: str | None = None
    against: tuple[str, ...] | None = None
    like: str | None = None
    on: str | None = None
    word: int | None = None
    keypoint: int | None = None
    axis: str | None = None

    @property
    def kind(self) -> str:
        """What it is of: "class", "box", "missed", "mask", "text", "like", "word" or "keypoint"."""
        named = (name for name in ("mask", "text", "like", "word", "keypoint") if getattr(self, name) is not None)
        return "missed" if self.missed else "box" if self.number is not None else next(named, "class")

    @property
    def title(self) -> str:
        """What people call it: "espresso", "box 3, person", "mask of dog", a sentence."""
        kind, name = self.kind, name_class(self.index, self.label)
        if kind == "class":
            return name
        at = ",".join(f"{side:.0f}" for side in self.box or ())
        titles = {
            "box": f"{_of(self.edge and f'{self.edge} edge')}box {self.number}, {name}",
            "missed": f"missed {name}{f' at {at}' if at else ''}",
            "mask": f"mask of {name}{'' if self.mask == 'predicted' else f' at {self.mask}'}",
            "text": self.text or "",
            "like": f"{'like' if self.on is None else 'in'} {PurePath(self.like or '').name}",
            "word": f"word {self.word}, {name}",
            "keypoint": f"{_of(self.axis)}keypoint {self.keypoint}{'' if name.startswith('keypoint ') else f', {name}'}",
        }
        return titles[kind]


def _of(part: str | None) -> str:
    return f"{part} of " if part else ""


@dataclass(frozen=True)
class Record:
    """What became of one picture. A picture that failed has an error, and nothing explained. `note`: what a person
    should know of how the picture is shown. `size`: its (height, width). `region`: the pixels that the network saw,
    (top, left, height, width), which maps lie on. `fit`: how it was shown these, where not by its own preprocessing:
    "whole", or "tiles:224" for windows of so many pixels. `sha256`: of what was read, where that is asked for. `tar`:
    the one that all its files lie in, whose names then are `tar/member`. `page`: the page with all of its maps. `edits`:
    what was taken away of the picture, as `gradcam run --edit` takes it."""

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
    page: str | None = None
    edits: Sequence[str] | None = None

    __repr__ = show_fields

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
        paths = [*(path for paths in kinds for path in paths), self.page]
        yield from dict.fromkeys(path for path in paths if path is not None)

    def to_json(self) -> str:
        fields: dict[str, Any] = {"schema": SCHEMA, "image": self.image, "status": self.status, "error": self.error}
        # Not asdict(), whose deep copies are half of what a record costs where there are a thousand in a second.
        fields |= {key: value for key, value in _without_absent(vars(self)).items() if key not in fields}
        fields["predictions"] = [_without_absent(vars(entry)) for entry in self.predictions]
        fields["explained"] = [_without_absent(vars(entry)) for entry in self.explained]
        return json.dumps(fields, allow_nan=False)

    @staticmethod
    def from_json(line: str | bytes) -> Record:
        """The record in one line, as `to_json` gives it; keys that are not known here are left out. Raises
        `GradcamError` for what is no record, and for one of another schema."""
        found = _load(line)
        if not isinstance(found, dict) or "schema" not in found:
            raise GradcamError(f"it is {shorten(found)}, expected a record")
        if found["schema"] != SCHEMA or isinstance(found["schema"], (bool, float)):
            raise GradcamError(
                f"its schema is {shorten(found['schema'])}, but this version of gradcam reads {SCHEMA}: "
                "use the version that wrote it, or a newer one"
            )
        try:
            texts = {
                it: _check(found.get(it), str, type(None)) for it in ("error", "note", "fit", "sha256", "tar", "page")
            }
            record = Record(
                image=_check(found["image"], str),
                model=_check(found["model"], str),
                predictions=tuple(_to_entry(Prediction, it) for it in _check(found.get("predictions", []), list)),
                explained=tuple(_to_entry(Explained, it) for it in _check(found.get("explained", []), list)),
                size=_to_list(found.get("size"), 2),
                region=_to_list(found.get("region"), 4),
                edits=None
                if found.get("edits") is None
                else tuple(_check(it, str) for it in _check(found["edits"], list)),
                **texts,
            )
            if found.get("status", record.status) != record.status:
                raise ValueError(f"its status is {shorten(found['status'])}, but its error requires '{record.status}'")
            return record
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise GradcamError(f"it is not a complete record ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class Report:
    """A picture's record, and what else there is to tell of it, or left to do. `seconds`: what it took. `files`: those
    that are recorded, by name, where nobody wrote them yet. `grids`: the maps' sizes. `device`: what computed them.
    `task`: what the model does, one of `options.TASKS`."""

    record: Record
    seconds: float = 0.0
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    grids: Sequence[tuple[int, ...]] = ()
    device: str = ""
    task: str = "classification"


def _load(line: str | bytes) -> Any:
    try:
        return json.loads(line.decode() if isinstance(line, bytes) else line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise GradcamError("it is not valid JSON") from error


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity, which JSON has not


# Of what is in an entry, by the annotations.
KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
KINDS |= {f"{name} | None": (*kinds, type(None)) for name, kinds in KINDS.items()}
# What lists hold, and of how many; None for any number.
LISTS: dict[str, tuple[int | None, tuple[type, ...]]] = {
    "Box | None": (4, (int, float)), "Point | None": (2, (int, float)), "tuple[str, ...] | None": (None, (str,)),
}  # fmt: skip


def _to_entry(kind: type[Entry], found: Any) -> Entry:
    """What is known of it; what has no value, and must have one, is a `KeyError`."""
    values = _check(found, dict)
    known = [each for each in fields(kind) if each.name in values or each.default is MISSING]
    made = {}
    for each in known:
        value, named = values[each.name], str(each.type)
        made[each.name] = _to_list(value, *LISTS[named]) if named in LISTS else _check(value, *KINDS[named])
    return kind(**made)


def _to_list(value: Any, count: int | None, kinds: tuple[type, ...] = (int,)) -> Any:
    if value is None:
        return None
    if len(_check(value, list)) != count and count is not None:
        raise ValueError(f"{shorten(value)} does not have {count} numbers")
    return tuple(_check(each, *kinds) for each in value)


def _check(value: Any, *kinds: type) -> Any:
    is_odd = (isinstance(value, bool) and bool not in kinds) or (isinstance(value, float) and not math.isfinite(value))
    if is_odd or not isinstance(value, kinds):
        raise TypeError(f"{shorten(value)} is not of type {kinds[0].__name__}")
    return value


def _without_absent(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None or key not in OPTIONAL}
