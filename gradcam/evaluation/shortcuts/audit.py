"""Find shortcuts: cues, such as a watermark, that some images of one class have and other classes lack."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from gradcam.cam.methods.base import Method
from gradcam.errors import InputError, ModelError, shorten
from gradcam.evaluation.explainers import StepCounter
from gradcam.evaluation.shortcuts.clusters import MIN_IMAGES_PER_CLASS, Cluster, Evidence, check_installed, find_cues
from gradcam.evaluation.shortcuts.evidence import ImageEvidence, collect_evidence
from gradcam.evaluation.shortcuts.labels import Labels, find_labels
from gradcam.evaluation.shortcuts.result import Audit, EvidenceCluster, describe_place, draw_heatmap
from gradcam.evaluation.snapshots.snapshot import ItemExplainer, read_pixels
from gradcam.images.read import Pixels
from gradcam.models.classifier import Classifier
from gradcam.models.labels import name_class
from gradcam.options import Progress
from gradcam.sources.collect import Inputs, list_inputs
from gradcam.sources.contents import InputImage

MAX_LISTED = 8  # largest number of class names in a note


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
    """Find shortcuts: cluster the heatmaps of each class, and rank clusters by the rarity of their evidence elsewhere.

    If a model has learnt a cue for a class, such as a watermark, the images with this cue form a cluster. In these
    images, the evidence has the same position and similar features. Images of other classes have no evidence at this
    position. A cluster is a reason to inspect the images, not a proof. An audit can also miss shortcuts, because
    post-hoc explanations often do not reveal unknown cues (Adebayo et al. 2022). docs/howto/audit.md reports how often
    this audit finds planted cues.

    Parameters
    ----------
    inputs : path, URL or image, or several
        As in `gradcam.explain_files`: images of two classes or more.
    classifier : Classifier
        The model. Choose the target layer with `load_classifier(layer=...)`.
    labels : path or mapping of str to str, default None
        The classes to explain: a table with the columns image and class, a mapping from image names to classes,
        "folders" or "predicted". "folders" uses the name of each image's folder, and "predicted" uses the top class of
        each image. None means "folders" if folders are named like classes of the model, otherwise "predicted".
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
        The clusters, the most suspicious first, and the whole-class cues. `failures` has a line for each image that was
        left out.

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
    >>> result = gradcam.evaluation.audit("labelled/", gradcam.load_classifier())
    >>> result.source, sorted({(cluster.class_name, cluster.image_count) for cluster in result.clusters})
    ("the folders' names", [('espresso', 12), ('macaw', 12)])
    >>> result.clusters[0].suspicion < 0.5
    True
    """
    settings: Any = {"method": method, "score": score, "reshape": reshape, "batch_size": batch_size}
    items = list_inputs(inputs).items
    return audit_items(items, classifier, labels=labels, progress=progress, workers=workers, **settings)


def audit_items(
    items: Sequence[InputImage],
    classifier: Classifier,
    *,
    labels: Labels | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Audit:
    """Audit a list of images, with the options of `audit`."""
    check_installed()
    explainer = ItemExplainer.create(classifier, **settings)
    if classifier.fit != "crop":
        raise ModelError(f"An audit needs the model's default crop, but fit is {classifier.fit!r}: use fit='crop'.")
    items, source, failures = find_labels(labels, items, classifier)
    evidence, blank = collect_evidence(explainer, items, failures, StepCounter(progress, total=len(items)).step)
    sizes = Counts(image.class_index for image in evidence)
    # Images are counted by class index, because two classes may have the same name.
    counts = [(name_class(index, classifier.label(index)), count) for index, count in sorted(sizes.items())]
    _check_classes(counts, failures)
    classes = np.array([image.class_index for image in evidence], np.int64)
    maps, features = (np.stack([getattr(image, name) for image in evidence]) for name in ("map", "features"))
    results, whole_class = (
        tuple(_describe(cluster, evidence, sizes, classifier) for cluster in clusters)
        for clusters in find_cues(Evidence.from_maps(classes, maps, features))
    )
    notes = tuple(_note(source, evidence, blank, counts, labels))
    method = explainer.request.methods[0].name
    described = classifier.name, method, explainer.layer, source
    return Audit(*described, results, tuple(blank), failures, notes, whole_class)


def _check_classes(counts: Sequence[tuple[str, int]], failures: Mapping[str, str]) -> None:
    """Raise `InputError` for fewer than two classes, or if no class has enough images to cluster."""
    if not counts:
        first = f" The first of {len(failures)} failures: {shorten(next(iter(failures.values())))}" if failures else ""
        raise InputError(f"No image has positive evidence for its class.{first}")
    name, count = max(counts, key=itemgetter(1))
    if len(counts) < 2:
        problem = f"All {count} images with positive evidence are of one class, {name}"
        raise InputError(f"{problem}: give images of at least two classes to compare.")
    if count < MIN_IMAGES_PER_CLASS:
        raise InputError(
            f"Clustering needs {MIN_IMAGES_PER_CLASS} images with positive evidence in a class, but the largest class, "
            f"{name}, has {count}: give more images."
        )


def _describe(
    cluster: Cluster, evidence: Sequence[ImageEvidence], sizes: Mapping[int, int], classifier: Classifier
) -> EvidenceCluster:
    members = {evidence[i].item.name: evidence[i] for i in cluster.members}
    measures: Any = {
        name: getattr(cluster, name) for name in ("suspicion", "place", "apart", "elsewhere", "is_rest", "purity")
    }
    return EvidenceCluster(
        index=cluster.class_,
        label=classifier.label(cluster.class_),
        image_count=sizes[cluster.class_],
        other_image_count=cluster.other_count,
        members=tuple(members),
        where=describe_place(cluster.map),
        map=cluster.map,
        draw_member=partial(_draw, classifier, members),
        **measures,
    )


def _draw(classifier: Classifier, members: Mapping[str, ImageEvidence], name: str) -> Pixels:
    """Draw a member of a cluster. Raise `ImageError` if the image can no longer be read."""
    return draw_heatmap(read_pixels(classifier, members[name].item), members[name].map, members[name].region)


def _note(
    source: str, evidence: Sequence[ImageEvidence], blank: Sequence[str], counts: Sequence[tuple[str, int]], labels: Any
) -> Iterator[str]:
    if labels is None:
        advice = "" if "folders" in source else ". Use --labels FILE (labels= in Python) to read them from a table"
        yield f"The explained classes are {source}{advice}."
    wrong = sum(image.class_index != image.predicted for image in evidence)
    if wrong:
        subject = f"For {wrong} of {len(evidence)} images, the model does not predict the label."
        yield f"{subject} The heatmaps of these images explain the label, not the prediction."
    if blank:
        subject = "images have" if len(blank) > 1 else "image has"
        yield f"{len(blank)} {subject} no positive evidence for the class. Blank heatmaps are not clustered."
    small = [f"{name} ({count})" for name, count in counts if count < MIN_IMAGES_PER_CLASS]
    if small:
        more = f", and {len(small) - MAX_LISTED} more" if len(small) > MAX_LISTED else ""
        yield (
            f"A class needs {MIN_IMAGES_PER_CLASS} images with positive evidence to be clustered. These classes have fewer "
            f"such images and are used only for comparison: {', '.join(small[:MAX_LISTED])}{more}."
        )
