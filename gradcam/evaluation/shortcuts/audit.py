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
    """Cluster the evidence for each class, and rank clusters by how much other classes have their like.

    A cue that a model has learnt for a class, such as a watermark, makes a cluster of maps that lie in one place and mark
    one look, where pictures of other classes have no evidence. What is found is a reason to look, and what is not found
    may be there all the same: post-hoc methods miss cues that nobody planted (Adebayo et al. 2022). docs/howto/audit.md
    has measured how often this one finds planted ones.

    Parameters
    ----------
    inputs : path, URL or picture, or several
        As in `gradcam.explain_files`: pictures of two classes or more.
    classifier : Classifier
        The model. Its `layer` is explained: `load_classifier(layer=...)` chooses it.
    labels : path or mapping of str to str, default None
        The class of each picture, which is explained: a table with the columns image and class; a mapping from pictures'
        names to classes; "folders", for the name of the folder that each lies in; or "predicted". None takes the folders
        where these are called like classes of the model, and otherwise what the model predicts.
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
        Called with the pictures done and the number of all.

    Returns
    -------
    Audit
        With the most suspicious cluster first, and a line in `failures` for each picture that is left out.

    Raises
    ------
    GradcamError
        Where scikit-learn is missing (`gradcam-torch[audit]`), and as `gradcam.explain_files` does.
    ModelError
        For a model that is no classifier, or is shown pictures in windows.
    InputError
        For labels that cannot be read, and where fewer than two classes have evidence, or none enough of it.

    Examples
    --------
    >>> import gradcam
    >>> found = gradcam.evaluation.audit("labelled/", gradcam.load_classifier())
    >>> found.source, sorted({(cluster.class_name, cluster.pictures) for cluster in found.clusters})
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
        raise ModelError(
            f"Pictures are clustered as the network itself sees them, and fit is {classifier.fit!r}: take 'crop'."
        )
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
        first = f" The first of {len(failures)} lines: {shorten(next(iter(failures.values())))}" if failures else ""
        raise InputError(f"No picture has evidence for its class.{first}")
    if len(sizes) < 2:
        raise InputError(
            f"All {len(marked)} pictures with evidence are of one class, {names(marked[0].explained)}: its evidence is "
            "compared with that of other classes, so give pictures of two, at least."
        )
    if max(sizes.values()) < LEAST:
        index, count = sizes.most_common(1)[0]
        raise InputError(
            f"No class has the {LEAST} pictures with evidence that are needed to cluster it; the largest, "
            f"{names(index)}, has {count}."
        )


def _describe(
    group: Group, marked: Sequence[Marked], sizes: Mapping[int, int], classifier: Classifier
) -> EvidenceCluster:
    members = {marked[i].item.name: marked[i] for i in group.members}
    numbers: Any = {
        name: getattr(group, name) for name in ("suspicion", "place", "apart", "elsewhere", "others", "is_rest")
    }
    return EvidenceCluster(
        index=group.class_,
        label=classifier.label(group.class_),
        pictures=sizes[group.class_],
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
        advice = "" if "folders" in source else "; --labels FILE (labels= in Python) takes them from a table"
        yield f"Classes are {source}{advice}."
    wrong = sum(one.explained != one.predicted for one in marked)
    if wrong:
        yield f"The model predicts another class for {wrong} of {len(marked)} pictures; their maps are of the label's class."
    if blank:
        has = "pictures have" if len(blank) > 1 else "picture has"
        yield f"{len(blank)} {has} no evidence for the class: the map is blank, and in no cluster."
    if few:
        names = ", ".join([*few[:NAMED], *([f"and {len(few) - NAMED} more"] if len(few) > NAMED else [])])
        yield (
            f"Classes with fewer than {LEAST} pictures with evidence are not clustered, and stand for other classes only: "
            f"{names}."
        )
