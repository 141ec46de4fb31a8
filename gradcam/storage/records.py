"""The record of an image, which `run --json` prints and `batch` writes to its manifest."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import PurePath
from typing import Any, TypeVar

from gradcam.errors import GradcamError, format_fields, shorten
from gradcam.models.labels import name_class

SCHEMA = 1

Entry = TypeVar("Entry", "Prediction", "Explained")

FILE_KEYS = ("overlay", "heatmap", "map", "panel", "mask_file")  # The keys of an explanation's files.
# A record omits these keys if their value is None.
OPTIONAL_KEYS = (
    *("heatmap", "map", "panel", "mask_file", "boxes", "fit", "sha256", "tar", "page", "edits", "figure"),
    *("box", "point", "number", "edge", "missed", "mask", "text", "against", "like", "on", "word", "keypoint", "axis"),
    *("without_image", "from_text", "prompt", "answer"),
)

Box = tuple[float, float, float, float]  # (left, top, right, bottom), in pixels of the image
Point = tuple[float, float]  # (x, y), in pixels of the image
# A region's box and score: (left, top, right, bottom, score), in pixels of the image. Right and bottom are exclusive.
ScoredBox = tuple[float, float, float, float, float]


@dataclass(frozen=True)
class Prediction:
    """A predicted class, box, segmented class, caption word or keypoint.

    The `probability` of a segmented class is its share of the image's pixels. `number` is the number of the box, word
    or keypoint. `box` or `point` gives its position.
    """

    index: int
    label: str | None
    probability: float
    number: int | None = None
    box: Box | None = None
    point: Point | None = None


@dataclass(frozen=True)
class Explained:
    """One explanation of an image: the class, its score, the layer, the method and the kind of evidence.

    If `blank` is True, all values of the map are zero. For a custom target function, `index` is None and `label` is the
    function's name. `overlay`, `heatmap`, `map`, `panel` and `mask_file` name the written files. Several explanations
    may share a panel. `boxes` are around the heatmap's regions, if they were requested.

    The other fields describe targets that are not classes. Boxes have a `box`, its `number`, and the `edge` to explain.
    `missed` is True for an expected object that was not detected. `mask` says how the region was selected. `text` is
    the sentence, and `against` lists the sentences to contrast with `text`. `like` is the reference image. If the map
    is on the reference image, `on` is "reference". If the map is on a further image of the prompt, `on` is its path.
    `word` is the number of a word in the caption, and `without_image` is its probability if the image is blank.
    If the image does not make the word much more probable, `from_text` is True.
    `keypoint` is the number of a keypoint, `point` is its position, and `axis` is the coordinate to explain.
    """

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
    mask_file: str | None = None
    boxes: tuple[ScoredBox, ...] | None = None
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
    without_image: float | None = None
    from_text: bool | None = None

    @property
    def files(self) -> dict[str, str]:
        """Return the written files, by key."""
        return {key: path for key in FILE_KEYS if (path := getattr(self, key)) is not None}

    @property
    def kind(self) -> str:
        """Return the kind of target: "class", "box", "missed", "mask", "text", "like", "word" or "keypoint"."""
        kinds = (name for name in ("mask", "text", "like", "word", "keypoint") if getattr(self, name) is not None)
        return "missed" if self.missed else "box" if self.number is not None else next(kinds, "class")

    @property
    def title(self) -> str:
        """Return a title for people, such as "espresso", "box 3, person", "mask of dog", or a sentence."""
        kind, name = self.kind, name_class(self.index, self.label)
        if kind == "class":
            return name
        position = ",".join(f"{coordinate:.0f}" for coordinate in self.box or ())
        titles = {
            "box": f"{_add_of(self.edge and f'{self.edge} edge')}box {self.number}, {name}",
            "missed": f"missed {name}{f' at {position}' if position else ''}",
            "mask": f"mask of {name}{'' if self.mask == 'predicted' else f' at {self.mask}'}",
            "text": self.text or "",
            "like": f"{'like' if self.on is None else 'in'} {PurePath(self.like or '').name}",
            "word": f"word {self.word}, {name}{f' in {PurePath(self.on).name}' if self.on else ''}"
            f"{' (from the text)' if self.from_text else ''}",
            "keypoint": f"{_add_of(self.axis)}keypoint {self.keypoint}{'' if name.startswith('keypoint ') else f', {name}'}",
        }
        return titles[kind]


def _add_of(part: str | None) -> str:
    return f"{part} of " if part else ""


@dataclass(frozen=True)
class Record:
    """The result for one image. A failed image has an `error` and no explanations.

    `note` is a remark on how the image was read or is displayed. `size` is (height, width). `region` is the part of the
    image that the network saw, as (top, left, height, width) in pixels. The maps cover the same region. If the model's
    own preprocessing was used, `fit` is None. Otherwise `fit` is "whole", or "tiles:224" for windows of 224 pixels.
    `sha256` is the hash of the image file, if the hash was requested. If the files are in a tar archive, `tar` is the
    name of the archive, and file names have the form `tar/member`. `page` is the HTML page with all maps. `edits` lists
    the parts that `gradcam run --edit` removed from the image. `figure` is the figure of all images of the command. `prompt`
    is the prompt of a vision-language model, and `answer` is the text whose words are explained.
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
    page: str | None = None
    edits: Sequence[str] | None = None
    figure: str | None = None
    prompt: str | None = None
    answer: str | None = None

    __repr__ = format_fields

    @property
    def status(self) -> str:
        """Return "ok" or "failed"."""
        return "ok" if self.error is None else "failed"

    @property
    def files(self) -> Iterator[str]:
        """Yield each written file once, by its recorded name. For files in a tar, yield only the tar."""
        if self.tar is not None:
            yield self.tar
            return
        paths = [path for item in self.explained for path in item.files.values()]
        yield from dict.fromkeys([*paths, *([] if self.page is None else [self.page])])

    def to_json(self) -> str:
        fields: dict[str, Any] = {"schema": SCHEMA, "image": self.image, "status": self.status, "error": self.error}
        # Do not use asdict(): its deep copies would take half of the time for writing a record.
        fields |= {key: value for key, value in _omit_absent(vars(self)).items() if key not in fields}
        fields["predictions"] = [_omit_absent(vars(entry)) for entry in self.predictions]
        fields["explained"] = [_omit_absent(vars(entry)) for entry in self.explained]
        return json.dumps(fields, allow_nan=False)

    @staticmethod
    def from_json(line: str | bytes) -> Record:
        """Decode the record in a line that `to_json` wrote. Ignore unknown keys.

        Raises `GradcamError` if the line is not a record, or has another schema.
        """
        fields = _load(line)
        if not isinstance(fields, dict) or "schema" not in fields:
            raise GradcamError(f"it is {shorten(fields)}, expected a record")
        if fields["schema"] != SCHEMA or isinstance(fields["schema"], (bool, float)):
            problem = f"its schema is {shorten(fields['schema'])}, but this version of gradcam reads {SCHEMA}"
            raise GradcamError(f"{problem}: use the version that wrote it, or a newer one")
        try:
            names = ("error", "note", "fit", "sha256", "tar", "page", "figure", "prompt", "answer")
            texts = {name: _require_type(fields.get(name), str, type(None)) for name in names}
            texts |= {name: _require_type(fields[name], str) for name in ("image", "model")}
            predictions = _to_entries(Prediction, fields.get("predictions", []))
            explained = _to_entries(Explained, fields.get("explained", []))
            lists = {"size": _to_list(fields.get("size"), 2), "region": _to_list(fields.get("region"), 4)}
            lists["edits"] = _to_list(fields.get("edits"), None, (str,))
            record = Record(predictions=predictions, explained=explained, **texts, **lists)
            if fields.get("status", record.status) != record.status:
                rule = "'failed' for a record with an error, 'ok' otherwise"
                raise ValueError(f"its status is {shorten(fields['status'])}, expected '{record.status}' ({rule})")
            return record
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise GradcamError(f"it is not a complete record ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class ImageOutcome:
    """The record of an image, and data that the record does not contain.

    `seconds` is the duration of the step that made the record. `files` are the recorded files that are not written yet.
    `grids` are the sizes of the maps. `device` is the device that computed the maps. `task` is one of `options.TASKS`.
    """

    record: Record
    seconds: float = 0.0
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    grids: Sequence[tuple[int, ...]] = ()
    device: str = ""
    task: str = "classification"


def _load(line: str | bytes) -> Any:
    try:
        return json.loads(line.decode() if isinstance(line, bytes) else line, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise GradcamError("it is not valid JSON") from error


def _reject_constant(constant: str) -> None:
    raise ValueError(constant)  # JSON has no NaN and no Infinity.


# Maps the annotation of a field to the accepted types of its value.
VALUE_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
VALUE_TYPES |= {f"{name} | None": (*kinds, type(None)) for name, kinds in VALUE_TYPES.items()}
# Maps the annotation of a list field to the length of the list (None for any length) and the accepted types of its
# items.
LIST_TYPES: dict[str, tuple[int | None, tuple[type, ...]]] = {
    "Box | None": (4, (int, float)), "Point | None": (2, (int, float)),
    "tuple[str, ...] | None": (None, (str,)), "tuple[ScoredBox, ...] | None": (None, (list,)),
}  # fmt: skip


def _to_entries(entry_type: type[Entry], data: Any) -> tuple[Entry, ...]:
    """Convert JSON objects to entries. Ignore unknown fields. Raises `KeyError` if a required field is missing."""
    entries = []
    for values in _require_type(data, list):
        entry: dict[str, Any] = {}
        for attribute in fields(entry_type):
            name, kind = attribute.name, str(attribute.type)
            if name in _require_type(values, dict) or attribute.default is MISSING:
                read, types = (_to_list, LIST_TYPES[kind]) if kind in LIST_TYPES else (_require_type, VALUE_TYPES[kind])
                entry[name] = read(values[name], *types)
        if entry.get("boxes"):
            entry["boxes"] = tuple(_to_list(box, 5, (int, float)) for box in entry["boxes"])
        entries.append(entry_type(**entry))
    return tuple(entries)


def _to_list(value: Any, count: int | None, types: tuple[type, ...] = (int,)) -> Any:
    if value is None:
        return None
    if len(_require_type(value, list)) != count and count is not None:
        raise ValueError(f"{shorten(value)} does not have {count} numbers")
    return tuple(_require_type(item, *types) for item in value)


def _require_type(value: Any, *types: type) -> Any:
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    if is_infinite or (isinstance(value, bool) and bool not in types) or not isinstance(value, types):
        raise TypeError(f"{shorten(value)} is not of type {types[0].__name__}")
    return value


def _omit_absent(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None or key not in OPTIONAL_KEYS}
