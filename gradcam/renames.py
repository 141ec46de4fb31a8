"""List renamed public names in one table. Aliases, record keys and the migration page are made from this table.

Until the version in `REMOVED_IN`, an old name works like the new one and issues a `FutureWarning`. Records have both
the old and the new keys.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

Kind = Literal["name", "parameter", "attribute", "option", "key", "value"]
REMOVED_IN = "0.5"

# These records have renamed keys.
CHECK, DIFF, AUDIT, RECOMMEND = (
    "gradcam check --json",
    "gradcam diff --json",
    "gradcam audit --json",
    "gradcam recommend --json",
)
EVALUATE, JOURNAL, FEATURES = (
    "gradcam evaluate --json",
    "kind in gradcam evaluate --json and its journal",
    "gradcam inspect features --json",
)
TRACE = "gradcam inspect trace --json"
RUN, PAGE, DRAWN_DIFF = "run.json", "the data of an HTML page", "ImageDiff.draw()"


class Rename(NamedTuple):
    """One old name and its replacement.

    `owner` is what the name belongs to: a module, a function or class with its module, or a kind of record.
    """

    kind: Kind
    owner: str
    old: str
    new: str
    removed_in: str = REMOVED_IN


def _rename(kind: Kind, owner: str, **names: str) -> list[Rename]:
    return [Rename(kind, owner, old, new) for old, new in names.items()]


RENAMES: tuple[Rename, ...] = (
    *_rename("name", "gradcam.evaluation", Sham="ControlMap", PictureDiff="ImageDiff"),
    *_rename(
        "name",
        "gradcam.models.results",
        PictureExplanation="ImageExplanation",
        PictureAttribution="ImageAttribution",
    ),
    *_rename("name", "gradcam.web.page", Things="PageTargets"),
    *_rename("name", "gradcam.images.edit", edit_picture="edit_image"),
    *_rename("parameter", "gradcam.read_image", picture="image"),
    *_rename("parameter", "gradcam.page", picture="image"),
    *_rename("parameter", "gradcam.images.edit.edit_image", picture="image"),
    *_rename("parameter", "gradcam.fuse", how="reduction"),
    *_rename("parameter", "gradcam.Classifier.prepare", picture="image"),
    *_rename("parameter", "gradcam.Classifier.explain", pictures="images"),
    *_rename("parameter", "gradcam.Classifier.compare", pictures="images"),
    *_rename("parameter", "gradcam.Classifier.attribute", pictures="images"),
    *_rename("parameter", "gradcam.Classifier.batch", pictures="images"),
    *_rename("parameter", "gradcam.Classifier.find_class", wanted="name"),
    *_rename("parameter", "gradcam.inspection.draw_activations", picture="input_image"),
    *_rename("parameter", "gradcam.inspection.watch_gradients", on_found="on_nonfinite"),
    *_rename("parameter", "gradcam.evaluation.check", picture="image", others="other_images"),
    *_rename("parameter", "gradcam.evaluation.make_mosaics", pictures="images", least="min_probability"),
    *_rename("parameter", "gradcam.evaluation.recommend", pictures="images", least="min_probability"),
    *_rename("parameter", "gradcam.evaluation.mean_interval", pictures="images"),
    *_rename("parameter", "gradcam.evaluation.paired_difference", pictures="images"),
    *_rename("parameter", "gradcam.evaluation.Annotations.truth", picture="image_size"),
    *_rename("attribute", "gradcam.Explanation", found="detections"),
    *_rename("attribute", "gradcam.Classifier", carry_out="run_plan"),
    *_rename(
        "attribute",
        "gradcam.TargetLayer",
        let_go="release",
        gave_several="has_several_outputs",
        require_only_way="require_single_path",
    ),
    *_rename("attribute", "gradcam.inspection.Call", also="other_names"),
    *_rename("attribute", "gradcam.targets.ClassTarget", one="select"),
    *_rename("attribute", "gradcam.targets.Like", pictures="images"),
    *_rename("attribute", "gradcam.models.results.ImageExplanation", pictures="images", one="select"),
    *_rename("attribute", "gradcam.models.results.ImageAttribution", pictures="images", one="select", picture="draw"),
    *_rename("attribute", "gradcam.web.page.Page", picture="image", things="targets", judged="with_verdict"),
    *_rename("attribute", "gradcam.web.page.MapSet", things="targets"),
    *_rename(
        "attribute",
        "gradcam.evaluation.Verdict",
        told_apart="distinguished_from",
        shams="controls",
        picture="image",
        exhibits="artifacts",
        thing="target_fields",
    ),
    *_rename("attribute", "gradcam.evaluation.ControlMap", is_apart="is_distinguished"),
    *_rename("attribute", "gradcam.evaluation.ImageDiff", kept="old_class_probability", seen="entries"),
    *_rename("attribute", "gradcam.evaluation.Snapshot", pictures="entries"),
    *_rename("attribute", "gradcam.evaluation.Answer", judged_by="measure"),
    *_rename(
        "attribute",
        "gradcam.evaluation.Recommendation",
        one="single_object",
        several="several_objects",
        pictures="images",
    ),
    *_rename("attribute", "gradcam.evaluation.EvidenceCluster", pictures="image_count", others="other_image_count"),
    Rename("option", "gradcam recommend", "--least", "--min-probability"),
    *_rename("key", CHECK, told_apart="distinguished_from", shams="controls", is_apart="is_distinguished"),
    Rename("value", CHECK, "another picture", "another image"),
    *_rename("key", DIFF, pictures="images", kept="old_class_probability"),
    *_rename("key", DRAWN_DIFF, picture="image"),
    *_rename("key", AUDIT, pictures="image_count", others="other_image_count"),
    *_rename("key", RECOMMEND, one="single_object", several="several_objects", pictures="images", judged_by="measure"),
    *_rename("key", RECOMMEND, given="input_count", taken="sampled_count"),
    *_rename("key", EVALUATE, pictures="images"),
    Rename("value", JOURNAL, "picture", "image"),
    *_rename("key", FEATURES, pictures="images"),
    *_rename("key", TRACE, also="other_names"),
    *_rename("key", RUN, pictures="images"),
    *_rename("key", PAGE, picture="image", things="targets"),
)


def find_old_names(module: str, get: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that finds its old names.

    A lazy module passes `get`, which finds all other names.
    """
    names = {row.old: row for row in RENAMES if row.kind == "name" and row.owner == module}

    def find(name: str) -> Any:
        row = names.get(name)
        if row is None and get is not None:
            return get(name)
        if row is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_of_old_name(f"{module}.{name}", row.new, row)
        return getattr(sys.modules[module], row.new)

    return find


class OldKeys(dict[str, Any]):
    """A dict that also returns a value for its old key. Iteration yields only the new keys."""

    def __init__(self, owner: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._rows = {row.old: row for row in _select_rows(owner, "key")}

    def __missing__(self, key: str) -> Any:
        row = self._rows.get(key)
        if row is None:
            raise KeyError(key)
        warn_of_old_name(f"[{key!r}]", f"[{row.new!r}]", row)
        return self[row.new]


def add_old_keys(owner: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with both the old and the new keys. The contents of an old key have only old keys and values."""
    keys, values = ({row.new: row.old for row in _select_rows(owner, kind)} for kind in ("key", "value"))
    old_fields = {keys[key]: _replace(value, keys, values) for key, value in record.items() if key in keys}
    return {**record, **old_fields}


def add_new_keys(owner: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of an earlier version with the new keys added."""
    keys = {row.old: row.new for row in _select_rows(owner, "key")}
    return {**{keys[key]: value for key, value in record.items() if key in keys}, **record}


def to_new_value(owner: str, value: str) -> str:
    """Return the new name of a value in a record of an earlier version."""
    return next((row.new for row in _select_rows(owner, "value") if row.old == value), value)


def _select_rows(owner: str, kind: Kind) -> list[Rename]:
    return [row for row in RENAMES if (row.kind, row.owner) == (kind, owner)]


def _replace(value: Any, keys: Mapping[str, str], values: Mapping[str, str]) -> Any:
    """Replace keys and strings in nested lists and dicts."""
    if isinstance(value, str):
        return values.get(value, value)
    if isinstance(value, list):
        return [_replace(entry, keys, values) for entry in value]
    if isinstance(value, dict):
        return {keys.get(key, key): _replace(entry, keys, values) for key, entry in value.items()}
    return value


def find_renamed(kind: Kind, qualname: str) -> dict[str, Rename]:
    """Return the rows of one kind for a function or class, by old name."""
    return {row.old: row for row in RENAMES if row.kind == kind and row.owner.endswith(f".{qualname}")}


def warn_of_old_name(old: str, new: str, row: Rename, *, level: int = 3) -> None:
    """Issue a `FutureWarning` at the caller's line, `level` calls above."""
    message = f"{old} is now {new}. The old name will be removed in gradcam {row.removed_in}."
    warnings.warn(message, FutureWarning, stacklevel=level)


def read_old_attribute(owner: object, name: str) -> Any:
    """Return the attribute that replaces an old one. This is `__getattr__` of classes that do not import this module."""
    row = next(
        (row for kind in type(owner).__mro__ if (row := find_renamed("attribute", kind.__qualname__).get(name))), None
    )
    if row is None:
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")
    warn_of_old_name(f"{type(owner).__name__}.{name}", row.new, row, level=4)
    return getattr(owner, row.new)
