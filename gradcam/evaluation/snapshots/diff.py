"""Two models on the same pictures: where predictions agree and maps do not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gradcam.batch.read import read_item
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import find_method
from gradcam.errors import GradcamError, ImageError, ModelError, describe_failure, shorten
from gradcam.evaluation.explainers import Counter
from gradcam.evaluation.snapshots.gate import ALIKE
from gradcam.evaluation.snapshots.result import CHANGES, Diff, compare_seen
from gradcam.evaluation.snapshots.snapshot import Look, Origin, Seen, Snapshot, collect
from gradcam.images.read import Pixels
from gradcam.models.classifier import Classifier
from gradcam.models.preprocess import Prepared
from gradcam.options import Progress, check_number
from gradcam.sources.contents import GivenContent, Item
from gradcam.sources.list import Inputs, list_inputs


def diff(
    old: Classifier | Snapshot,
    new: Classifier,
    inputs: Inputs,
    *,
    method: str | Method | None = None,
    score: str | None = None,
    reshape: Any = None,
    alike: float = ALIKE,
    batch_size: int | str = "auto",
    workers: int | None = None,
    progress: Progress | None = None,
) -> Diff:
    """Compare the predictions and heatmaps of two models on the same images.

    Compare two checkpoints, two precisions, or a model and its quantised version. Both heatmaps explain the class that the
    old model predicts, and are compared on the region that both models see. Heatmaps are rounded to 16 bits, as in a
    snapshot, so that a model and its snapshot give the same numbers.

    Parameters
    ----------
    old : Classifier or Snapshot
        The old model, or its snapshot from `take_snapshot`.
    new : Classifier
        The new model, with the same classes. Choose the target layers with `load_classifier(layer=...)`.
    inputs : path, URL or image, or several
        As in `take_snapshot`. Images are matched with a snapshot by the SHA-256 of their files.
    method : str or Method, default None
        As in `gradcam.explain`; None uses the snapshot's method, if there is one.
    score : str, default None
        As in `targets.ClassTarget`; None uses the snapshot's score, or "logit".
    reshape : tuple, str or callable, default None
        As in `gradcam.explain`, for both models.
    alike : float, default 0.9
        The smallest rank correlation, from -1 to 1, at which two heatmaps count as alike.
    batch_size : int or "auto", default "auto"
        As in `gradcam.explain_files`.
    workers : int, default None
        As in `gradcam.explain_files`.
    progress : callable, default None
        Called with the number of finished images and the total. An image counts once for each model that runs.

    Returns
    -------
    Diff
        One row per image, and a line in `failures` for each image that could not be compared.

    Raises
    ------
    ModelError
        If a model is not a classifier, or the models have different classes.
    GradcamError
        If the method or score differs from the snapshot's. Also as in `gradcam.explain_files`.

    Examples
    --------
    >>> import gradcam
    >>> old, new = gradcam.load_classifier(), gradcam.load_classifier(layer="layer3")
    >>> found = gradcam.evaluation.diff(old, new, ["photo.jpg", "photos/"])
    >>> found.worst.change, found.summary
    ('map', '3 images: 3 with the same class and a different heatmap, 0 with a different class, 0 alike; correlation ...')
    """
    check_number(alike, "alike", "a rank correlation from -1 to 1.", least=-1, most=1)
    if isinstance(old, Snapshot):
        _check_explained(old.origin, method, score)
        method, score = method or old.origin.method, old.origin.score
    settings = {"reshape": reshape, "batch_size": batch_size, "workers": workers}
    how: Any = {"method": method, "score": score or "logit", **settings}
    earlier, look = old if isinstance(old, Snapshot) else Look.of(old, **how), Look.of(new, **how)
    _check_classes(earlier.origin, look.origin)
    items = list_inputs(inputs).items
    counter = Counter(progress, total=len(items) * (1 if isinstance(earlier, Snapshot) else 2))
    before = _find_kept(earlier, new, items) if isinstance(earlier, Snapshot) else collect(earlier, items, counter.step)
    seen, left = {it.name: it for it in before.entries}, [it for it in items if it.name not in before.failures]
    counter.total -= len(items) - len(left)
    now = collect(look, left, counter.step, {name: it.explained for name, it in seen.items()})
    rows, failures, reads = [], {**before.failures, **now.failures}, {item.name: item for item in left}
    for one in now.entries:
        read = partial(_read, new, reads[one.name])
        try:
            rows.append(compare_seen(seen[one.name], one, (before.origin, now.origin), alike, read))
        except GradcamError as error:
            failures[one.name] = describe_failure(one.name, error)
    rows.sort(key=lambda row: (CHANGES.index(row.change), row.correlation))
    order = {item.name: i for i, item in enumerate(items)}
    failures = dict(sorted(failures.items(), key=lambda it: order[it[0]]))
    notes = [*_note_models(earlier, now.origin), *_note_pictures(earlier, before, seen, now)]
    return Diff(before.origin, now.origin, tuple(rows), failures, tuple(notes), float(alike))


def _check_explained(kept: Origin, method: str | Method | None, score: str | None) -> None:
    """Raises `GradcamError` where something else is asked for than what the snapshot holds."""
    asked = None if method is None else find_method(method).name
    for name, value, there in (("method", asked, kept.method), ("score", score, kept.score)):
        if value not in (None, there):
            raise GradcamError(
                f"The snapshot was taken with the {name} {there}, not {value}: leave the {name} out, or take a new snapshot."
            )


def _check_classes(old: Origin, new: Origin) -> None:
    """Raises `ModelError` where a class of one model is not the same class of the other."""
    if old.classes != new.classes:
        raise ModelError(
            f"OLD, {old.model}, has {old.classes} classes and NEW, {new.model}, has {new.classes}: give two models with the "
            "same classes."
        )
    pairs = list(zip(old.labels or (), new.labels or ()))
    differing = [i for i, (one, other) in enumerate(pairs) if one.casefold() != other.casefold()]
    if differing:
        first, more = differing[0], f" ({len(differing)} classes differ)" if len(differing) > 1 else ""
        raise ModelError(
            f"Class {first} is {shorten(pairs[first][0])} in OLD, {old.model}, and {shorten(pairs[first][1])} in NEW, "
            f"{new.model}{more}. If they mean the same, load both with the same labels (--labels FILE)."
        )


def _find_kept(kept: Snapshot, classifier: Classifier, items: Sequence[Item]) -> Snapshot:
    """What the snapshot holds of these pictures, under the names that they have here; a failure for each that it does not
    hold, or that cannot be read."""
    by_hash, names = {it.sha256: it for it in kept.entries}, {it.name for it in kept.entries}
    found, failures = [], {}
    for item in items:
        try:
            digest = _hash(item, classifier)
            if digest not in by_hash:
                changed = "has changed since the snapshot was taken"
                raise ImageError(changed if item.name in names else "is not in the snapshot")
            found.append(replace(by_hash[digest], name=item.name))
        except ImageError as error:  # noqa: PERF203  (of this one)
            failures[item.name] = describe_failure(item.name, error)
    return Snapshot(kept.origin, tuple(found), failures)


def _hash(item: Item, classifier: Classifier) -> str:
    """The SHA-256 of a picture's file, or of its values where it is in none. Raises `ImageError` where it cannot be read."""
    if not isinstance(item.content, GivenContent):
        return hashlib.sha256(item.content.read()).hexdigest()
    found = read_item(classifier, replace(item, wanted=None), audit=True)
    if isinstance(found.picture, GradcamError) or found.fetched.sha256 is None:
        raise ImageError(str(found.picture))
    return found.fetched.sha256


def _read(classifier: Classifier, item: Item) -> Pixels:
    found = read_item(classifier, replace(item, wanted=None)).picture
    if isinstance(found, Prepared):
        return found.reading.picture
    raise ImageError(str(found))


def _note_models(earlier: Look | Snapshot, new: Origin) -> Iterator[str]:
    old, is_kept = earlier.origin, isinstance(earlier, Snapshot)
    if is_kept and old.architecture != new.architecture:
        yield f"The models have different architectures: tensor names or shapes of {old.model} and {new.model} differ."
    changed = [
        f"{name} {old.versions.get(name)}" for name, now in new.versions.items() if old.versions.get(name) != now
    ]
    if changed:
        yield f"The snapshot was taken with other versions ({', '.join(changed)}): heatmaps may differ in their last digits."
    if old.layer != new.layer:
        yield f"OLD is explained at {old.layer} and NEW at {new.layer}."
    if old.preprocessing != new.preprocessing:
        yield (
            f"OLD and NEW have different preprocessing, which changes heatmaps as well: {old.preprocessing} and "
            f"{new.preprocessing}. Use --size, --crop, --mean and --std to set both (size=, ... in Python)."
        )
    if not is_kept and (old.weights, old.dtype, old.layer) == (new.weights, new.dtype, new.layer):
        yield "OLD and NEW have the same weights and the same precision."


def _note_pictures(
    earlier: Look | Snapshot, before: Snapshot, seen: Mapping[str, Seen], now: Snapshot
) -> Iterator[str]:
    if isinstance(earlier, Snapshot):
        left = {it.sha256 for it in earlier.entries} - {it.sha256 for it in before.entries}
        if left:
            verb = "was" if len(left) == 1 else "were"
            yield f"{len(left)} of the snapshot's {len(earlier.entries)} images {verb} missing or changed."
    differing = [it.name for it in now.entries if seen[it.name].region != it.region]
    if differing:
        yield (
            f"OLD and NEW see different parts of {len(differing)} of {len(now.entries)} images. Their heatmaps are "
            "compared on the common part."
        )
