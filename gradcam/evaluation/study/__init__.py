"""Studies: methods by metrics over many pictures, resumable, with tables and pictures of what was found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradcam.evaluation.study.journal import Journal
from gradcam.evaluation.study.plan import DEFAULT_METHODS, make_plan
from gradcam.evaluation.study.prepare import Wish, prepare_study
from gradcam.evaluation.study.results import Results
from gradcam.evaluation.study.run import Progress
from gradcam.models.classifier import Classifier
from gradcam.sources.list import Inputs, list_inputs


def evaluate(
    classifier: Classifier,
    inputs: Inputs,
    *,
    methods: Sequence[str] = DEFAULT_METHODS,
    metrics: Sequence[str] | None = None,
    controls: Sequence[str] | None = None,
    layer: str | None = None,
    target: str | int | None = None,
    score: str = "logit",
    reshape: Any = None,
    annotations: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    journal: str | os.PathLike[str] | None = None,
) -> Results:
    """Judge the maps of several methods over pictures, all under the same conditions; `compare_methods` ranks them.

    `inputs`: files, folders, globs, lists, archives and pictures, as `gradcam.explain_files` takes them. Each picture is
    judged on its own: neither the others nor their order change its numbers. One that cannot be read, or explained, has an
    error in the results, and the rest is done.
    `methods`: keys of `gradcam.METHODS`, "single-pass" or "all". `metrics`: keys of `METRICS`, names of its groups, or
    "all"; None for all that need nothing but pictures, and annotations where these are given. `controls`: keys of
    `CONTROLS`, to compare with; None for all of them.
    `layer`: dotted name, None for `classifier.layer_for(method)`. `target`: the class to explain in all pictures, by label
    or index; None for what a list asks for, or the most probable one, of those that annotations name in a picture if they
    do.
    `score`: a key of `SCORES`; a method that explains a score of its own does so. `reshape`: as in `gradcam.explain`.
    `annotations`: where objects are, as `read_annotations` takes it. `limit`: at most so many pictures, drawn by the
    seed; those of a smaller limit are among those of a larger one. `progress`: called with how many maps are judged, and
    of how many. `journal`: a file that keeps what was judged; the same study goes on with it where it was stopped.

    The same pictures, seed and versions give the same numbers, to the last digit, on one machine.
    Raises `GradcamError` for unknown names, and for a metric or method that was named and cannot be had: grid metrics need
    confident pictures of four classes, those of localisation need annotations, some methods need attention. Raises
    `InputError` where there is no picture, and `OutputError` for a journal of another study.
    """
    plan = make_plan(methods, metrics, controls=controls, has_annotations=annotations is not None)
    wish = Wish(
        layer=layer,
        target=target,
        score=score,
        reshape=reshape,
        annotations=None if annotations is None else Path(annotations),
        limit=limit,
        seed=seed,
    )
    study = prepare_study(classifier, list_inputs(inputs).items, plan, wish)
    if journal is None:
        return study.conclude(list(study.run(progress=progress)))
    with Journal.open(Path(journal), study.conditions.to_run(len(study.items))) as kept:
        return study.conclude(list(study.run(kept, progress=progress)))
