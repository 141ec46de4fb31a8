"""List renamed public names in one table, from which aliases, record keys and the migration page are generated.

Until the version in `REMOVED_IN`, an old name works like the new name, and issues a `FutureWarning`. Records have both
the old and the new keys.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

Kind = Literal["name", "parameter", "attribute", "option", "key", "value"]
REMOVED_IN = "0.5"

# The kinds of records that have renamed keys.
CHECK, DIFF, AUDIT, RECOMMEND, FEATURES, TRACE = (
    f"gradcam {command} --json"
    for command in ("check", "diff", "audit", "recommend", "inspect features", "inspect trace")
)
EVALUATE, JOURNAL = "results.json of gradcam evaluate", "`kind` in gradcam evaluate --json and journal.jsonl"
RUN, PAGE, DRAWN_DIFF = "run.json", "page.to_data()", "ImageDiff.draw()"


class Rename(NamedTuple):
    """One old name and its replacement.

    `owner` is the dotted name of the module, function or class that has the name, or a kind of record.
    """

    kind: Kind
    owner: str
    old: str
    new: str
    removed_in: str = REMOVED_IN


def _rename(kind: Kind, owner: str, **names: str) -> list[Rename]:
    return [Rename(kind, owner, old, new) for old, new in names.items()]


def _rename_in_code(kind: Kind, owners: str, **names: str) -> list[Rename]:
    """Return the same renames for each of the modules, functions or classes in `owners`, separated by spaces."""
    return [row for owner in owners.split() for row in _rename(kind, f"gradcam.{owner}", **names)]


_names = partial(_rename_in_code, "name")
_parameters = partial(_rename_in_code, "parameter")
_attributes = partial(_rename_in_code, "attribute")
_keys = partial(_rename, "key")

RENAMES: tuple[Rename, ...] = (
    *_names("evaluation", Sham="ControlMap", PictureDiff="ImageDiff"),
    *_names("models.results", PictureExplanation="ImageExplanation", PictureAttribution="ImageAttribution"),
    *_names("web.page", Things="PageTargets"),
    *_names("images.edit", edit_picture="edit_image"),
    *_parameters("read_image page images.edit.edit_image Classifier.prepare", picture="image"),
    *_parameters("fuse", how="reduction"),
    *_parameters("Classifier.explain Classifier.compare Classifier.attribute Classifier.batch", pictures="images"),
    *_parameters("Classifier.find_class", wanted="name"),
    *_parameters("inspection.draw_activations", picture="input_image"),
    *_parameters("inspection.watch_gradients", on_found="on_nonfinite"),
    *_parameters("evaluation.check", picture="image", others="other_images"),
    *_parameters("evaluation.make_mosaics evaluation.recommend", pictures="images", least="min_probability"),
    *_parameters("evaluation.mean_interval evaluation.paired_difference", pictures="images"),
    *_parameters("evaluation.Annotations.truth", picture="image_size"),
    *_attributes("Explanation", found="detections"),
    *_attributes("Classifier", carry_out="run_plan"),
    *_attributes("TargetLayer", let_go="release", gave_several="has_several_outputs"),
    *_attributes("TargetLayer", require_only_way="require_single_path"),
    *_attributes("inspection.Call", also="other_names"),
    *_attributes("targets.ClassTarget", one="select"),
    *_attributes("targets.Like", pictures="images"),
    *_attributes("models.results.ImageExplanation models.results.ImageAttribution", pictures="images", one="select"),
    *_attributes("models.results.ImageAttribution", picture="draw"),
    *_attributes("web.page.Page", picture="image", things="targets", judged="with_verdict"),
    *_attributes("web.page.MapSet", things="targets"),
    *_attributes("evaluation.Verdict", told_apart="distinguished_from", shams="controls", picture="image"),
    *_attributes("evaluation.Verdict", exhibits="artifacts", thing="target_fields"),
    *_attributes("evaluation.ControlMap", is_apart="is_distinguished"),
    *_attributes("evaluation.ImageDiff", kept="old_class_probability", seen="entries"),
    *_attributes("evaluation.Diff", worst="first_row"),
    *_attributes("evaluation.Snapshot", pictures="entries"),
    *_attributes("evaluation.Answer", judged_by="measure"),
    *_attributes("evaluation.Recommendation", one="single_object", several="several_objects", pictures="images"),
    *_attributes("evaluation.EvidenceCluster", pictures="image_count", others="other_image_count"),
    Rename("option", "gradcam recommend", "--least", "--min-probability"),
    *_keys(CHECK, told_apart="distinguished_from", shams="controls", is_apart="is_distinguished"),
    Rename("value", CHECK, "another picture", "another image"),
    *_keys(DIFF, pictures="images", kept="old_class_probability"),
    *_keys(DRAWN_DIFF, picture="image"),
    *_keys(AUDIT, pictures="image_count", others="other_image_count"),
    *_keys(RECOMMEND, one="single_object", several="several_objects", pictures="images", judged_by="measure"),
    *_keys(RECOMMEND, given="input_count", taken="sampled_count"),
    *_keys(EVALUATE, pictures="images"),
    Rename("value", JOURNAL, "picture", "image"),
    *_keys(FEATURES, pictures="images"),
    *_keys(TRACE, also="other_names"),
    *_keys(RUN, pictures="images"),
    *_keys(PAGE, picture="image", things="targets"),
)


def find_old_names(module: str, get: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module that finds the module's old names.

    If the module exports its names lazily, it already has a `__getattr__`. Pass this function as `get`, to find all
    other names.
    """
    names = {row.old: row for row in RENAMES if row.kind == "name" and row.owner == module}

    def find(name: str) -> Any:
        if name in names:
            warn_of_old_name(f"{module}.{name}", names[name].new, names[name])
            return getattr(sys.modules[module], names[name].new)
        if get is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return get(name)

    return find


class OldKeys(dict[str, Any]):
    """A dict that also finds values by their old keys. Iteration yields only the new keys."""

    def __init__(self, owner: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._rows = {row.old: row for row in _select_rows(owner, "key")}

    def __missing__(self, key: str) -> Any:
        row = self._rows[key]
        warn_of_old_name(f"[{key!r}]", f"[{row.new!r}]", row)
        return self[row.new]


def add_old_keys(owner: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with both the old and the new keys. The value under an old key contains only old names."""
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
    """Return the renames of one kind in a function or class, by old name."""
    return {row.old: row for row in RENAMES if row.kind == kind and row.owner.endswith(f".{qualname}")}


def warn_of_old_name(old: str, new: str, row: Rename, *, level: int = 3) -> None:
    """Issue a `FutureWarning`. `level` is the stack level of the line to which the warning points."""
    message = f"{old} is now {new}. The old name will be removed in gradcam {row.removed_in}."
    warnings.warn(message, FutureWarning, stacklevel=level)


def read_old_attribute(owner: object, name: str, level: int = 4) -> Any:
    """Return the attribute that replaces an old attribute, and issue a warning with the stack level `level`."""
    for kind in type(owner).__mro__:
        if (row := find_renamed("attribute", kind.__qualname__).get(name)) is not None:
            warn_of_old_name(f"{type(owner).__name__}.{name}", row.new, row, level=level)
            return getattr(owner, row.new)
    raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")
