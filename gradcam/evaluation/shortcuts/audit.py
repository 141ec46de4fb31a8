"""Find shortcuts: evidence that some pictures of one class have, and no other class."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gradcam.batch.read import read_item
from gradcam.cam.methods.base import Method
from gradcam.errors import ImageError, InputError, ModelError, shorten
from gradcam.evaluation.explainers import Counter
from gradcam.evaluation.shortcuts.clusters import LEAST, Evidence, Group, check_installed, cluster
from gradcam.evaluation.shortcuts.evidence import Marked, collect_evidence
from gradcam.evaluation.shortcuts.labels import Labels, find_labels
from gradcam.evaluation.shortcuts.result import Audit, EvidenceCluster, describe_place, draw_marked
from gradcam.evaluation.snapshots.snapshot import Look
from gradcam.images.read import Pixels
from gradcam.models.classifier import Classifier
from gradcam.models.labels import name_class
from gradcam.models.preprocess import Prepared
from gradcam.options import Progress
from gradcam.sources.contents import Item
from gradcam.sources.list import Inputs, list_inputs

NAMED = 8  # classes in a note


def audit(
    inputs: Inputs,
    classifier: Classifier,
    *,
    labels: Labels | None = None,
    method: str | Method | None = None,
    score: str = "logit",
    reshape: Any = None,
    batch_size: int | str = "auto",
    workers: int | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Find shortcuts: cluster the evidence for each class, and rank clusters by how rare they are in other classes.

    If a model has learnt a cue for a class, such as a watermark, the class's heatmaps form a cluster. The evidence lies in
    one place and looks alike, and other classes have no evidence there. A cluster is a reason to look at the images, not a
    proof. An audit can also miss shortcuts: post-hoc explanations often do not reveal unknown cues (Adebayo et al. 2022).
    docs/howto/audit.md reports how often this audit finds planted cues.

    Parameters
    ----------
    inputs : path, URL or image, or several
        As in `gradcam.explain_files`: images of two classes or more.
    classifier : Classifier
        The model. Choose the target layer with `load_classifier(layer=...)`.
    labels : path or mapping of str to str, default None
        The class to explain in each image: a table with the columns image and class, a mapping from image names to
        classes, "folders" or "predicted". "folders" is the name of each image's folder, and "predicted" is the class that
        the model predicts. None is "folders" if folders are named like classes of the model, and "predicted" otherwise.
    method : str or Method, default None
        As in `gradcam.explain`.
    score : str, default "logit"
        As in `targets.ClassTarget`.
    reshape : tuple, str or callable, default None
        As in `gradcam.explain`.
    batch_size : int or "auto", default "auto"
        As in `gradcam.explain_files`.
    workers : int, default None
        As in `gradcam.explain_files`.
    progress : callable, default None
        Called with the number of finished images and the total.

    Returns
    -------
    Audit
        The clusters, the most suspicious first, and a line in `failures` for each image that was left out.

    Raises
    ------
    GradcamError
        If scikit-learn is missing (extra `audit`). Also as in `gradcam.explain_files`.
    ModelError
        If the model is not a classifier, or its `fit` is not "crop".
    InputError
        If the labels cannot be read, if fewer than two classes have positive evidence, or if no class has enough images
        with positive evidence.

    Examples
    --------
    >>> import gradcam
    >>> found = gradcam.evaluation.audit("labelled/", gradcam.load_classifier())
    >>> found.source, sorted({(cluster.class_name, cluster.image_count) for cluster in found.clusters})
    ("the folders' names", [('espresso', 12), ('macaw', 12)])
    >>> found.clusters[0].suspicion < 0.5
    True
    """
    settings: Any = {"method": method, "score": score, "reshape": reshape, "batch_size": batch_size}
    more: Any = {"labels": labels, "workers": workers, "progress": progress}
    return audit_items(list_inputs(inputs).items, classifier, **settings, **more)


def audit_items(
    items: Sequence[Item],
    classifier: Classifier,
    *,
    labels: Labels | None = None,
    progress: Progress | None = None,
    method: str | Method | None = None,
    score: str = "logit",
    reshape: Any = None,
    batch_size: int | str = "auto",
    workers: int | None = None,
) -> Audit:
    """As `audit`, of pictures that are listed already."""
    check_installed()
    settings: Any = {"reshape": reshape, "batch_size": batch_size, "workers": workers}
    look = Look.of(classifier, method=method, score=score, **settings)
    if classifier.fit != "crop":
        raise ModelError(f"An audit needs the model's default crop, but fit is {classifier.fit!r}: use fit='crop'.")
    labelled = find_labels(labels, items, classifier)
    counter = Counter(progress, total=len(labelled.items))
    marked, blank, failures = collect_evidence(look, labelled.items, counter.step)
    names = partial(_name, classifier)
    _check_classes(marked, names, {**labelled.failures, **failures})
    classes = np.array([one.explained for one in marked], np.int64)
    evidence = Evidence.of(classes, np.stack([one.map for one in marked]), np.stack([one.features for one in marked]))
    found = cluster(evidence)
    sizes = Count(one.explained for one in marked)
    few = [f"{names(index)} ({count})" for index, count in sorted(sizes.items()) if count < LEAST]
    return Audit(
        classifier.name,
        look.request.methods[0].name,
        look.layer,
        labelled.source,
        tuple(_describe(group, marked, sizes, classifier) for group in found),
        tuple(blank),
        {**labelled.failures, **failures},
        tuple(_note(labelled.source, marked, blank, few, labels)),
    )


def _name(classifier: Classifier, index: int) -> str:
    return name_class(index, classifier.label(index))


def _check_classes(marked: Sequence[Marked], names: Any, failures: Mapping[str, str]) -> None:
    """Raises `InputError` where there is nothing to compare with, or nothing to cluster."""
    sizes = Count(one.explained for one in marked)
    if not marked:
        first = f" The first of {len(failures)} failures: {shorten(next(iter(failures.values())))}" if failures else ""
        raise InputError(f"No image has positive evidence for its class.{first}")
    if len(sizes) < 2:
        raise InputError(
            f"All {len(marked)} images with positive evidence are of one class, {names(marked[0].explained)}: give images "
            "of at least two classes to compare."
        )
    if max(sizes.values()) < LEAST:
        index, count = sizes.most_common(1)[0]
        raise InputError(
            f"Clustering needs {LEAST} images with positive evidence in a class, but the largest class, "
            f"{names(index)}, has {count}: give more images."
        )


def _describe(
    group: Group, marked: Sequence[Marked], sizes: Mapping[int, int], classifier: Classifier
) -> EvidenceCluster:
    members = {marked[i].item.name: marked[i] for i in group.members}
    numbers: Any = {name: getattr(group, name) for name in ("suspicion", "place", "apart", "elsewhere", "is_rest")}
    return EvidenceCluster(
        index=group.class_,
        label=classifier.label(group.class_),
        image_count=sizes[group.class_],
        other_image_count=group.others,
        members=tuple(members),
        where=describe_place(group.map),
        map=group.map,
        draw_member=partial(_draw, classifier, members),
        **numbers,
    )


def _draw(classifier: Classifier, members: Mapping[str, Marked], name: str) -> Pixels:
    """Raises `ImageError` where the picture cannot be read any more."""

    one = members[name]
    found = read_item(classifier, replace(one.item, wanted=None)).picture
    if not isinstance(found, Prepared):
        raise ImageError(str(found))
    return draw_marked(found.reading.picture, one.map, one.region)


def _note(
    source: str, marked: Sequence[Marked], blank: Sequence[str], few: Sequence[str], labels: Labels | None
) -> Iterator[str]:
    if labels is None:
        advice = "" if "folders" in source else ". Use --labels FILE (labels= in Python) to read them from a table"
        yield f"The explained classes are {source}{advice}."
    wrong = sum(one.explained != one.predicted for one in marked)
    if wrong:
        yield f"For {wrong} of {len(marked)} images, the model does not predict the label. Their heatmaps explain the label."
    if blank:
        has = "images have" if len(blank) > 1 else "image has"
        yield f"{len(blank)} {has} no positive evidence for the class. Blank heatmaps are not clustered."
    if few:
        names = ", ".join([*few[:NAMED], *([f"and {len(few) - NAMED} more"] if len(few) > NAMED else [])])
        yield (
            f"Classes with fewer than {LEAST} images with positive evidence are not clustered. Clusters of other classes "
            f"are compared with them: {names}."
        )
