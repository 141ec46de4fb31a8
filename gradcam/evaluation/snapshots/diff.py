"""Compare the predictions and heatmaps of two models on the same images."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gradcam.batch.read_items import read_item
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import find_method
from gradcam.errors import GradcamError, ImageError, ModelError, describe_failure, shorten
from gradcam.evaluation.explainers import StepCounter
from gradcam.evaluation.snapshots.gate import MIN_ALIKE_CORRELATION
from gradcam.evaluation.snapshots.result import CHANGES, Diff, compare_entries
from gradcam.evaluation.snapshots.snapshot import ItemExplainer, Origin, Snapshot, read_pixels
from gradcam.models.classifier import Classifier
from gradcam.options import Progress, check_number
from gradcam.sources.collect import Inputs, list_inputs
from gradcam.sources.contents import InMemoryImage, InputImage


def diff(
    old: Classifier | Snapshot,
    new: Classifier,
    inputs: Inputs,
    *,
    method: str | Method | None = None,
    score: str | None = None,
    reshape: Any = None,
    alike: float = MIN_ALIKE_CORRELATION,
    batch_size: int | str = "auto",
    workers: int | None = None,
    progress: Progress | None = None,
) -> Diff:
    """Compare the predictions and heatmaps of two models on the same images.

    The models may be two checkpoints, two precisions, or a model and its quantised version. Both heatmaps explain the
    old model's top class, and are compared on the region that both models see. Heatmaps are rounded to 16 bits, as in a
    snapshot. A comparison with a snapshot therefore gives the same numbers as a comparison with the snapshot's model.

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
        Called with the number of finished images and the total. If both models run, each image counts twice.

    Returns
    -------
    Diff
        One row per image. `failures` has a line for each image that could not be compared.

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
    >>> result = gradcam.evaluation.diff(old, new, ["photo.jpg", "photos/"])
    >>> result.first_row.change, result.summary
    ('map', '3 images: 3 with the same class and a different heatmap, 0 with a different class, 0 alike; correlation ...')
    """
    check_number(alike, "alike", "a rank correlation from -1 to 1.", least=-1, most=1)
    if isinstance(old, Snapshot):
        _check_explained(old.origin, method, score)
        method, score = method or old.origin.method, old.origin.score
    settings: Any = {"score": score or "logit", "reshape": reshape, "batch_size": batch_size, "workers": workers}
    old_source = old if isinstance(old, Snapshot) else ItemExplainer.create(old, method=method, **settings)
    explainer = ItemExplainer.create(new, method=method, **settings)
    _check_classes(old_source.origin, explainer.origin)
    items = list_inputs(inputs).items
    counter = StepCounter(progress, total=len(items) * (1 if isinstance(old, Snapshot) else 2))
    if isinstance(old_source, Snapshot):
        old_snapshot = _find_entries(old_source, new, items)
    else:
        old_snapshot = old_source.explain(items, counter.step)
    old_entries = {entry.name: entry for entry in old_snapshot.entries}
    remaining = {item.name: item for item in items if item.name not in old_snapshot.failures}
    counter.total -= len(items) - len(remaining)
    classes = {name: entry.explained_class for name, entry in old_entries.items()}
    new_snapshot = explainer.explain(list(remaining.values()), counter.step, classes)
    rows, failures = [], {**old_snapshot.failures, **new_snapshot.failures}
    origins = old_snapshot.origin, new_snapshot.origin
    for entry in new_snapshot.entries:
        read = partial(read_pixels, new, remaining[entry.name])
        try:
            rows.append(compare_entries(old_entries[entry.name], entry, origins, alike, read))
        except GradcamError as error:
            failures[entry.name] = describe_failure(entry.name, error)
    rows.sort(key=lambda row: (CHANGES.index(row.change), row.correlation))
    failures = {item.name: failures[item.name] for item in items if item.name in failures}
    notes = [*_note_models(old_source, explainer.origin), *_note_images(old_source, old_snapshot, new_snapshot)]
    return Diff(*origins, tuple(rows), failures, tuple(notes), float(alike))


def _check_explained(origin: Origin, method: str | Method | None, score: str | None) -> None:
    """Raise `GradcamError` if the requested method or score is not the snapshot's."""
    method_name = None if method is None else find_method(method).name
    for name, value, recorded in (("method", method_name, origin.method), ("score", score, origin.score)):
        if value not in (None, recorded):
            problem = f"The snapshot was taken with the {name} {recorded}, not {value}"
            raise GradcamError(f"{problem}: leave the {name} out, or take a new snapshot.")


def _check_classes(old: Origin, new: Origin) -> None:
    """Raise `ModelError` if the two models have different classes."""
    if old.classes != new.classes:
        counts = f"OLD, {old.model}, has {old.classes} classes and NEW, {new.model}, has {new.classes}"
        raise ModelError(f"{counts}: give two models with the same classes.")
    pairs = list(zip(old.labels or (), new.labels or ()))
    differing = [i for i, (old_label, new_label) in enumerate(pairs) if old_label.casefold() != new_label.casefold()]
    if differing:
        first, more = differing[0], f" ({len(differing)} classes differ)" if len(differing) > 1 else ""
        raise ModelError(
            f"Class {first} is {shorten(pairs[first][0])} in OLD, {old.model}, and {shorten(pairs[first][1])} in NEW, "
            f"{new.model}{more}. If both names mean the same class, give both models the same --labels FILE."
        )


def _find_entries(snapshot: Snapshot, classifier: Classifier, items: Sequence[InputImage]) -> Snapshot:
    """Find the snapshot's entry for each image by hash, and rename each entry to the present name of its image.

    An image that cannot be read, or is not in the snapshot, becomes a failure.
    """
    by_hash, names = {entry.sha256: entry for entry in snapshot.entries}, {entry.name for entry in snapshot.entries}
    entries, failures = [], {}
    for item in items:
        try:
            digest = _hash(item, classifier)
            if digest not in by_hash:
                changed = "has changed since the snapshot was taken"
                raise ImageError(changed if item.name in names else "is not in the snapshot")
            entries.append(replace(by_hash[digest], name=item.name))
        except ImageError as error:  # noqa: PERF203  (Each image fails by itself.)
            failures[item.name] = describe_failure(item.name, error)
    return Snapshot(snapshot.origin, tuple(entries), failures)


def _hash(item: InputImage, classifier: Classifier) -> str:
    """Return the SHA-256 of an image's file, or of its pixels if there is no file. Raise `ImageError` on failure."""
    if not isinstance(item.content, InMemoryImage):
        return hashlib.sha256(item.content.read()).hexdigest()
    result = read_item(classifier, replace(item, wanted=None), audit=True)
    if isinstance(result.picture, GradcamError) or result.fetched.sha256 is None:
        raise ImageError(str(result.picture))
    return result.fetched.sha256


def _note_models(old_source: ItemExplainer | Snapshot, new: Origin) -> Iterator[str]:
    old, has_snapshot = old_source.origin, isinstance(old_source, Snapshot)
    if has_snapshot and old.architecture != new.architecture:
        yield f"The models have different architectures: tensor names or shapes of {old.model} and {new.model} differ."
    versions = {name: old.versions.get(name) for name in new.versions}
    changed = [f"{name} {version}" for name, version in versions.items() if version != new.versions[name]]
    if changed:
        yield f"The snapshot was taken with other versions ({', '.join(changed)}): heatmaps may differ in their last digits."
    if old.layer != new.layer:
        yield f"OLD is explained at {old.layer} and NEW at {new.layer}."
    if old.preprocessing != new.preprocessing:
        yield (
            f"OLD and NEW have different preprocessing, {old.preprocessing} and {new.preprocessing}. This difference alone "
            "changes heatmaps. Give both the same --size, --crop, --mean and --std (size=, ... in Python)."
        )
    if not has_snapshot and (old.weights, old.dtype, old.layer) == (new.weights, new.dtype, new.layer):
        yield "OLD and NEW have the same weights and the same precision."


def _note_images(old_source: ItemExplainer | Snapshot, old: Snapshot, new: Snapshot) -> Iterator[str]:
    if isinstance(old_source, Snapshot):
        missing = {entry.sha256 for entry in old_source.entries} - {entry.sha256 for entry in old.entries}
        if missing:
            verb = "was" if len(missing) == 1 else "were"
            yield f"{len(missing)} of the snapshot's {len(old_source.entries)} images {verb} missing or changed."
    old_regions = {entry.name: entry.region for entry in old.entries}
    differing = sum(old_regions[entry.name] != entry.region for entry in new.entries)
    if differing:
        difference = f"OLD and NEW see different parts of {differing} of {len(new.entries)} images."
        yield f"{difference} Heatmaps of these images are compared on the common part."
