"""The table of all methods, and functions to find a method by name, in a user's file, or in an installed package."""

# This module must not import torch at the top. The command line lists the methods in its help, and importing torch is
# slow.

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from gradcam.cam.methods import papers
from gradcam.cam.methods.base import (
    ActivationMethod,
    AttentionMethod,
    CurvatureMethod,
    GradientMethod,
    InputMethod,
    Method,
    RerunMethod,
    WordMethod,
)
from gradcam.errors import GradcamError, find_similar_names, join_names, shorten
from gradcam.options import EVIDENCE, SMOOTHINGS

# fmt: off
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        GradientMethod("gradcam", "gradient-weighted: channels weighted by their mean gradient",
            papers.GRADCAM, "one_pass:gradcam", channels="added", is_signed=True),
        GradientMethod("gradcam-pp", "gradient-weighted: channels weighted by a weighted sum of positive gradients",
            papers.GRADCAM_PP, "one_pass:gradcam_pp", channels="added"),
        GradientMethod("xgradcam", "gradient-weighted: channels weighted by their activation-weighted mean gradient",
            papers.XGRADCAM, "one_pass:xgradcam", channels="added", is_signed=True, assumes_positive=True),
        GradientMethod("hirescam", "gradient-weighted: activation times gradient, element-wise",
            papers.HIRESCAM, "one_pass:hirescam", channels="added", is_signed=True),
        GradientMethod("elementwise-gradcam", "gradient-weighted: positive part of activation times gradient, element-wise",
            papers.ELEMENTWISE, "one_pass:elementwise_gradcam", channels="added"),
        GradientMethod("layercam", "gradient-weighted: activation times positive gradient, element-wise",
            papers.LAYERCAM, "one_pass:layercam", channels="added"),
        GradientMethod("finercam", "Grad-CAM of the class against its three most similar classes",
            papers.FINERCAM, "one_pass:gradcam", channels="added", is_signed=True, score="finer"),
        CurvatureMethod("shapleycam", "Grad-CAM with a second-order (Hessian) term",
            papers.SHAPLEYCAM, "one_pass:shapleycam", cost="1, plus 2 backward passes", channels="added", is_signed=True),
        ActivationMethod("eigencam", "class-agnostic: first principal component of the activations",
            papers.EIGENCAM, "components:eigencam", channels="component"),
        GradientMethod("eigengradcam", "gradient-weighted: first principal component of activations times gradients",
            papers.ELEMENTWISE, "components:weighted_component", channels="component"),
        ActivationMethod("kpcacam", "class-agnostic: first kernel principal component of the activations",
            papers.KPCACAM, "components:kpcacam", channels="component"),
        ActivationMethod("fem", "class-agnostic: activations two standard deviations above their mean",
            papers.FEM, "one_pass:fem", channels="added"),
        RerunMethod("smoothgradcam-pp", "Grad-CAM++ with derivatives averaged over noisy copies of the image",
            papers.SMOOTHGRADCAM_PP, "perturbation:smooth_gradcam_pp", cost="1 + 20", channels="added",
            options={"samples": 20, "noise": 0.15, "seed": 0}),
        RerunMethod("ablationcam", "gradient-free: channels weighted by how much the score falls without them",
            papers.ABLATIONCAM, "perturbation:ablationcam", cost="1 + tail x channels", channels="added",
            is_signed=True, assumes_positive=True),
        RerunMethod("reciprocam", "gradient-free: for each cell, the score if only the activations around it are kept",
            papers.RECIPROCAM, "perturbation:reciprocam", cost="1 + tail x cells", is_signed=True, assumes_positive=True),
        RerunMethod("scorecam", "gradient-free: channels weighted by the score of the masked image",
            papers.SCORECAM, "perturbation:scorecam", cost="1 + channels", channels="added", assumes_positive=True),
        RerunMethod("fasterscorecam", "gradient-free: Score-CAM of the ten most variable channels",
            papers.FASTERSCORECAM, "perturbation:fasterscorecam", cost="1 + 10", channels="added",
            options={"channels": 10}, assumes_positive=True),
        RerunMethod("sscam", "gradient-free: Score-CAM averaged over noisy masks",
            papers.SSCAM, "perturbation:sscam", cost="1 + 35 x channels", channels="added",
            options={"samples": 35, "noise": 2.0, "seed": 0}, assumes_positive=True),
        RerunMethod("iscam", "gradient-free: Score-CAM averaged over masks of increasing strength",
            papers.ISCAM, "perturbation:iscam", cost="1 + 10 x channels", channels="added", options={"steps": 10},
            assumes_positive=True),
        InputMethod("rise", "gradient-free, without a layer: random masks weighted by their score",
            papers.RISE, "perturbation:rise", cost="1 + 4000", is_signed=True,
            options={"masks": 4000, "cells": 7, "probability": 0.5, "seed": 0}),
        InputMethod("drise", "gradient-free, for boxes: RISE with masks weighted by class score times overlap with the box",
            papers.DRISE, "perturbation:rise", cost="1 + 5000", is_signed=True,
            options={"masks": 5000, "cells": 16, "probability": 0.5, "seed": 0}),
        AttentionMethod("rollout", "class-agnostic: attention of all transformer blocks, multiplied",
            papers.ROLLOUT, "attention:rollout", cost="1 + 1"),
        AttentionMethod("gradient-rollout", "attention times its gradient, accumulated over all transformer blocks",
            papers.GRADIENT_ROLLOUT, "attention:gradient_rollout", cost="1 + 1, plus a backward pass per class"),
        AttentionMethod("legrad", "positive gradients at the attention of every transformer block, averaged",
            papers.LEGRAD, "attention:legrad", cost="1 + 1, plus a backward pass per class"),
        AttentionMethod("grad-eclip", "values of the last attention, weighted by gradients and attention",
            papers.GRAD_ECLIP, "attention:grad_eclip", cost="1, plus 1 for a model's first heatmap"),
        WordMethod("lens", "gradient-free, for words: probability of the word at each image token, in the text model",
            papers.LENS, "lens:lens", cost="1, without a backward pass"),
    )
}
# fmt: on

MAX_NAME_LENGTH = 100  # The limit, in characters, for a name that includes changed options.
ALIASES = {"chefer": "gradient-rollout"}  # Maps names that other packages use to names in this table.


def find_method(method: str | Method) -> Method:
    """Return the method with this name. A `Method` is returned unchanged.

    Upper case and hyphens are ignored, `++` is read as `-pp`, and the names in `ALIASES` are accepted. A name may also
    be `FILE.py:NAME`, or the name of a method from an installed package. If the name is unknown, raises `GradcamError`
    with the nearest names.
    """
    if isinstance(method, Method):
        return method
    name = method if isinstance(method, str) else ""
    table_method = find_in_table(name)
    if table_method is not None:
        return table_method
    from gradcam import plugins

    if plugins.is_custom(name) or name in plugins.list_entry_points("methods"):
        loaded = plugins.load_plugin("methods", name)
        if not isinstance(loaded, Method):
            raise GradcamError(f"{name} is {shorten(loaded)}, expected a function decorated with @gradcam.method.")
        return loaded
    all_names = [*METHODS, *plugins.list_entry_points("methods")]
    raise GradcamError(f"There is no method {shorten(method)}. {suggest_names(_normalise_name(name), all_names)}")


def find_in_table(name: str) -> Method | None:
    """Return the method of the table with this name or alias; None if there is no such method."""
    normalised = _normalise_name(ALIASES.get(_normalise_name(name), name))
    return next((method for method in METHODS.values() if _normalise_name(method.name) == normalised), None)


def suggest_names(
    name: str, names: Iterable[str], otherwise: str = "`gradcam methods` lists them (gradcam.METHODS in Python)."
) -> str:
    """Return advice for an unknown name: the most similar names, or `otherwise` if no name is similar."""
    offers = find_similar_names(name, names)
    return f"Nearest: {join_names(offers)}." if offers else otherwise


def _normalise_name(name: str) -> str:
    return name.lower().replace("++", "pp").replace("-", "")


def find_methods(methods: Iterable[str | Method]) -> list[Method]:
    """Return the methods without duplicates.

    If an earlier method has the same name, but other options, the changed options are appended to the name. Raises
    `GradcamError` for an unknown method, and if `methods` is not a list of at least one method.
    """
    is_list = isinstance(methods, Iterable) and not isinstance(methods, str)
    methods_by_name: dict[str, Method] = {}
    for method in map(find_method, methods) if is_list else ():
        first = methods_by_name.setdefault(method.name, method)
        if first != method:
            changed = [f"{key}={value}" for key, value in method.options.items() if first.options.get(key) != value]
            if not changed or first.function != method.function:
                raise GradcamError(f"Two methods are named {method.name!r}: rename one of them.")
            # Other characters are replaced, because the name becomes part of file names.
            name = re.sub(r"[^\w.=+-]+", "_", "-".join([method.name, *changed]), flags=re.ASCII)[:MAX_NAME_LENGTH]
            if methods_by_name.setdefault(name, replace(method, name=name)) != replace(method, name=name):
                raise GradcamError(f"Two methods are named {name!r}: rename one of them.")
    if not methods_by_name:
        raise GradcamError(f"methods is {shorten(methods)}, expected a list of at least one name.")
    return list(methods_by_name.values())


def apply_smoothing(methods: Sequence[Method], smoothing: str) -> list[Method]:
    """Return the methods with this smoothing. Raise `GradcamError` if a method does not support the smoothing."""
    if not isinstance(smoothing, str) or smoothing not in SMOOTHINGS:
        raise GradcamError(f"smoothing is {shorten(smoothing)}, expected one of {join_names(SMOOTHINGS)}.")
    return [method.smoothed() for method in methods] if smoothing == "eigen" else list(methods)


def check_evidence(evidence: str, methods: Sequence[Method]) -> None:
    """Raise `GradcamError` if the kind of evidence is unknown, or if a method does not support it."""
    if not isinstance(evidence, str) or evidence not in EVIDENCE:
        raise GradcamError(f"evidence is {shorten(evidence)}, expected one of {join_names(EVIDENCE)}.")
    unsigned = [method.name for method in methods if not method.is_signed]
    if evidence != "positive" and unsigned:
        signed = join_names(name for name, method in METHODS.items() if method.is_signed)
        raise GradcamError(f"{unsigned[0]} shows positive evidence only: evidence={evidence!r} works with {signed}.")
