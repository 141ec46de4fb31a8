"""The table of all methods, and how one is found: by its name, in a file of the user's own, or in an installed package."""

# No torch is imported here: the shell reads its choices from this table before there is anything to compute.

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradcam import plugins
from gradcam.cam.methods import papers
from gradcam.cam.methods.base import (
    Method,
    OfActivations,
    OfAttention,
    OfCurvatures,
    OfGradients,
    OfInput,
    OfReruns,
    check_plain,
)
from gradcam.errors import GradcamError, join_names, nearest, shorten
from gradcam.options import EVIDENCE, SMOOTHINGS

# fmt: off
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        OfGradients("gradcam", "gradient-weighted: channels weighted by their mean gradient",
            papers.GRADCAM, "one_pass:gradcam", channels="added", is_signed=True),
        OfGradients("gradcam-pp", "gradient-weighted: channels weighted by a weighted sum of positive gradients",
            papers.GRADCAM_PP, "one_pass:gradcam_pp", channels="added"),
        OfGradients("xgradcam", "gradient-weighted: channels weighted by their activation-weighted mean gradient",
            papers.XGRADCAM, "one_pass:xgradcam", channels="added", is_signed=True, assumes_positive=True),
        OfGradients("hirescam", "gradient-weighted: activation times gradient, element-wise",
            papers.HIRESCAM, "one_pass:hirescam", channels="added", is_signed=True, is_local=True),
        OfGradients("elementwise-gradcam", "gradient-weighted: positive part of activation times gradient, element-wise",
            papers.ELEMENTWISE, "one_pass:elementwise_gradcam", channels="added", is_local=True),
        OfGradients("layercam", "gradient-weighted: activation times positive gradient, element-wise",
            papers.LAYERCAM, "one_pass:layercam", channels="added", is_local=True),
        OfGradients("finercam", "Grad-CAM of the class against its three most similar classes",
            papers.FINERCAM, "one_pass:gradcam", channels="added", is_signed=True, score="finer"),
        OfCurvatures("shapleycam", "Grad-CAM with a second-order (Hessian) term",
            papers.SHAPLEYCAM, "one_pass:shapleycam", cost="1, plus 2 backward passes", channels="added",
            is_signed=True),
        OfActivations("eigencam", "class-agnostic: first principal component of the activations",
            papers.EIGENCAM, "one_pass:eigencam", channels="component"),
        OfGradients("eigengradcam", "gradient-weighted: first principal component of activations times gradients",
            papers.ELEMENTWISE, "one_pass:eigengradcam", channels="component"),
        OfActivations("kpcacam", "class-agnostic: first kernel principal component of the activations",
            papers.KPCACAM, "one_pass:kpcacam", channels="component"),
        OfActivations("fem", "class-agnostic: activations two standard deviations above their mean",
            papers.FEM, "one_pass:fem", channels="added"),
        OfReruns("smoothgradcam-pp", "Grad-CAM++ with derivatives averaged over noisy copies of the image",
            papers.SMOOTHGRADCAM_PP, "perturbation:smooth_gradcam_pp", cost="1 + 20", channels="added",
            options={"samples": 20, "noise": 0.15, "seed": 0}),
        OfReruns("ablationcam", "gradient-free: channels weighted by how much the score falls without them",
            papers.ABLATIONCAM, "perturbation:ablationcam", cost="1 + tail x channels", channels="added",
            is_signed=True, assumes_positive=True),
        OfReruns("reciprocam", "gradient-free: score when only one activation window is kept",
            papers.RECIPROCAM, "perturbation:reciprocam", cost="1 + tail x places", is_signed=True,
            assumes_positive=True),
        OfReruns("scorecam", "gradient-free: channels weighted by the score of the masked image",
            papers.SCORECAM, "perturbation:scorecam", cost="1 + channels", channels="added", assumes_positive=True),
        OfReruns("fasterscorecam", "gradient-free: Score-CAM of the ten most variable channels",
            papers.FASTERSCORECAM, "perturbation:fasterscorecam", cost="1 + 10", channels="added",
            options={"channels": 10}, assumes_positive=True),
        OfReruns("sscam", "gradient-free: Score-CAM averaged over noisy masks",
            papers.SSCAM, "perturbation:sscam", cost="1 + 35 x channels", channels="added",
            options={"samples": 35, "noise": 2.0, "seed": 0}, assumes_positive=True),
        OfReruns("iscam", "gradient-free: Score-CAM averaged over masks of increasing strength",
            papers.ISCAM, "perturbation:iscam", cost="1 + 10 x channels", channels="added", options={"steps": 10},
            assumes_positive=True),
        OfInput("rise",
            "gradient-free, without a layer: random masks weighted by their score",
            papers.RISE, "perturbation:rise", cost="1 + 4000", is_signed=True,
            options={"masks": 4000, "cells": 7, "probability": 0.5, "seed": 0}),
        OfInput("drise",
            "gradient-free: RISE for a detected box, by class and overlap",
            papers.DRISE, "perturbation:rise", cost="1 + 5000", is_signed=True,
            options={"masks": 5000, "cells": 16, "probability": 0.5, "seed": 0}),
        OfAttention("rollout", "class-agnostic: attention of all transformer blocks, multiplied",
            papers.ROLLOUT, "attention:rollout", cost="1 + 1"),
        OfAttention("gradient-rollout",
            "attention times its gradient, accumulated over all transformer blocks",
            papers.GRADIENT_ROLLOUT, "attention:gradient_rollout",
            cost="1 + 1, plus a backward pass per class"),
        OfAttention("legrad",
            "positive gradients at the attention of every transformer block, averaged",
            papers.LEGRAD, "attention:legrad", cost="1 + 1, plus a backward pass per class"),
        OfAttention("grad-eclip",
            "values of the last attention, weighted by gradients and attention",
            papers.GRAD_ECLIP, "attention:grad_eclip", cost="1, plus 1 the first time"),
    )
}
# fmt: on

LONGEST_NAME = 100  # of a method with options in it
ALIASES = {"chefer": "gradient-rollout"}  # what others call a method


def method(name: str, *, summary: str, signed: bool = False) -> Callable[[Callable[..., Any]], Method]:
    """Make a CAM method from a function of activations and gradients. Pass the result in place of a method's name.

    Parameters
    ----------
    name : str
        Its name in results and file names: letters, digits, "-" and "_".
    summary : str
        What it does, in one line.
    signed : bool, default False
        True if negative values of its maps are evidence against the class. This allows `evidence="negative"` and
        "signed".

    Returns
    -------
    callable
        A decorator for a pure function. Its parameters have these names: `activations` (N,C,...), optionally
        `gradients` (N,K,C,...) of the K scores, and optionally `curvatures` (N,K,C,...), the Hessian times the
        activations. The grid has any rank, and values are float32 or float64. The function returns maps (N,K,...), or
        maps (N,...) if it takes only `activations`. Maps have the dtype and device of the activations. Further
        parameters need defaults, and become options of `Method.using`.

    Raises
    ------
    GradcamError
        If the name is invalid or already exists, or if the function's parameters do not have the names above.

    Examples
    --------
    >>> import gradcam
    >>> @gradcam.method("mycam", summary="activations times positive gradients")
    ... def mycam(activations, gradients):
    ...     return (activations[:, None] * gradients.clamp(min=0)).sum(2)
    >>> mycam.name
    'mycam'
    """
    if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9][\w-]*", name, re.ASCII) is None:
        raise GradcamError(f"The method's name is {shorten(name)}, expected letters, digits, '-' and '_'.")
    if _find_known(name) is not None:
        raise GradcamError(f"A method named {name!r} already exists: choose another name.")

    def to_method(function: Callable[..., Any]) -> Method:
        kind, options = _read_signature(name, function)
        return kind(name, str(summary), None, function, options=options, is_signed=bool(signed))

    return to_method


def _read_signature(name: str, function: Any) -> tuple[type[Method], Mapping[str, Any]]:
    kinds: list[type[Method]] = [OfActivations, OfGradients, OfCurvatures]
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise GradcamError(f"{name} is {shorten(function)}, expected a function with a readable signature.") from None
    needs = tuple(each.name for each in found if each.default is each.empty and each.kind is not each.VAR_KEYWORD)
    kind = next((kind for kind in kinds if kind.needs == needs), None)
    is_odd = any(  # could not be called
        each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.KEYWORD_ONLY if each.name in needs else None)
        or (each.kind is each.POSITIONAL_ONLY and each.name not in needs)
        for each in found
    )
    if kind is None or is_odd:
        forms = " or ".join(f"({', '.join(kind.needs)})" for kind in kinds)
        raise GradcamError(
            f"{name} has the parameters {inspect.signature(function)}, expected {forms}, plus options with defaults."
        )
    return kind, check_plain(name, {each.name: each.default for each in found if each.default is not each.empty})


def find_method(method: str | Method) -> Method:
    """The method of that name, or a method itself. Raises `GradcamError` for an unknown one, and offers the nearest.
    Case and hyphens do not count, `++` is understood for `-pp`, and so are `ALIASES`. Another name is `FILE.py:NAME`,
    or an installed package's."""
    if isinstance(method, Method):
        return method
    name = method if isinstance(method, str) else ""
    known = _find_known(name)
    if known is not None:
        return known
    if plugins.is_own(name) or name in plugins.installed("methods"):
        found = plugins.load("methods", name)
        if not isinstance(found, Method):
            raise GradcamError(f"{name} is {shorten(found)}, expected a function decorated with @gradcam.method.")
        return found
    everything = [*METHODS, *plugins.installed("methods")]
    raise GradcamError(f"There is no method {shorten(method)}. {offer(_plain(name), everything)}")


def _find_known(name: str) -> Method | None:
    wanted = _plain(ALIASES.get(_plain(name), name))
    return next((known for known in METHODS.values() if _plain(known.name) == wanted), None)


def offer(
    name: str, known: Iterable[str], otherwise: str = "`gradcam methods` lists them (gradcam.METHODS in Python)."
) -> str:
    """What to say where nothing has that name: the nearest, if any looks like it, or where methods are listed."""
    offers = nearest(name, known)
    return f"Nearest: {join_names(offers)}." if offers else otherwise


def _plain(name: str) -> str:
    return name.lower().replace("++", "pp").replace("-", "")


def find_methods(methods: Iterable[str | Method]) -> list[Method]:
    """Each of them once. Raises `GradcamError` where one is unknown, and for what is no list of them. Two of one name
    are two methods: the one with other options than the first has them in its name."""
    is_list = isinstance(methods, Iterable) and not isinstance(methods, str)
    found: dict[str, Method] = {}
    for each in map(find_method, methods) if is_list else ():
        known = found.setdefault(each.name, each)
        if known != each:
            changed = [f"{key}={value}" for key, value in each.options.items() if known.options.get(key) != value]
            if not changed or known.function != each.function:
                raise GradcamError(f"Two methods are named {each.name!r}: rename one of them.")
            # It becomes a part of files' names.
            name = re.sub(r"[^\w.=+-]+", "_", "-".join([each.name, *changed]), flags=re.ASCII)[:LONGEST_NAME]
            if found.setdefault(name, replace(each, name=name)) != replace(each, name=name):
                raise GradcamError(f"Two methods are named {name!r}: rename one of them.")
    if not found:
        raise GradcamError(f"methods is {shorten(methods)}, expected a list of at least one name.")
    return list(found.values())


def smooth(methods: Sequence[Method], smoothing: str) -> list[Method]:
    """The methods with this smoothing. Raises `GradcamError` for an unknown one, and where a method cannot have it."""
    if not isinstance(smoothing, str) or smoothing not in SMOOTHINGS:
        raise GradcamError(f"smoothing is {shorten(smoothing)}, expected one of {join_names(SMOOTHINGS)}.")
    return [method.smoothed() for method in methods] if smoothing == "eigen" else list(methods)


def check_evidence(evidence: str, methods: Sequence[Method]) -> None:
    """Raises `GradcamError` for an unknown kind, and for one that has no meaning for one of the methods."""
    if not isinstance(evidence, str) or evidence not in EVIDENCE:
        raise GradcamError(f"evidence is {shorten(evidence)}, expected one of {join_names(EVIDENCE)}.")
    unsigned = [method.name for method in methods if not method.is_signed]
    if evidence != "positive" and unsigned:
        signed = join_names(name for name, method in METHODS.items() if method.is_signed)
        raise GradcamError(f"{unsigned[0]} shows positive evidence only: evidence={evidence!r} works with {signed}.")
