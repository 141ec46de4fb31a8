"""The table of all methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradcam.cam.methods import papers
from gradcam.cam.methods.base import ACTIVATIONS, CURVATURES, GRADIENTS, Method
from gradcam.errors import GradcamError, join_names, nearest, shorten
from gradcam.options import SMOOTHINGS

# No torch is imported here: the shell reads its choices from this table before there is anything to compute.


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            name="gradcam",
            summary="channels weighted by their mean gradient",
            source=papers.GRADCAM,
            cost="1",
            home="cam.methods.one_pass:gradcam",
            needs=GRADIENTS,
            channels="added",
            is_signed=True,
        ),
        Method(
            name="gradcam-pp",
            summary="Grad-CAM++: channels weighted by positive gradients, of which weak ones count more",
            source=papers.GRADCAM_PP,
            cost="1",
            home="cam.methods.one_pass:gradcam_pp",
            needs=GRADIENTS,
            channels="added",
        ),
        Method(
            name="xgradcam",
            summary="channels weighted by their mean gradient where they are active",
            source=papers.XGRADCAM,
            cost="1",
            home="cam.methods.one_pass:xgradcam",
            needs=GRADIENTS,
            channels="added",
            is_signed=True,
            assumes_positive=True,
        ),
        Method(
            name="hirescam",
            summary="activation times gradient, place by place",
            source=papers.HIRESCAM,
            cost="1",
            home="cam.methods.one_pass:hirescam",
            needs=GRADIENTS,
            channels="added",
            is_signed=True,
        ),
        Method(
            name="elementwise-gradcam",
            summary="the positive products of activation and gradient, place by place",
            source=papers.ELEMENTWISE,
            cost="1",
            home="cam.methods.one_pass:elementwise_gradcam",
            needs=GRADIENTS,
            channels="added",
        ),
        Method(
            name="layercam",
            summary="activation times positive gradient, place by place",
            source=papers.LAYERCAM,
            cost="1",
            home="cam.methods.one_pass:layercam",
            needs=GRADIENTS,
            channels="added",
        ),
        Method(
            name="finercam",
            summary="Grad-CAM of what sets the class apart from the three that score most like it",
            source=papers.FINERCAM,
            cost="1",
            home="cam.methods.one_pass:gradcam",
            needs=GRADIENTS,
            channels="added",
            is_signed=True,
            score="finer",
        ),
        Method(
            name="shapleycam",
            summary="Grad-CAM with a second-order term: half of the Hessian times the activations",
            source=papers.SHAPLEYCAM,
            cost="1, and the tail backwards twice",
            home="cam.methods.one_pass:shapleycam",
            needs=CURVATURES,
            channels="added",
            is_signed=True,
        ),
        Method(
            name="eigencam",
            summary="first principal component of the activations; of no class",
            source=papers.EIGENCAM,
            cost="1",
            home="cam.methods.one_pass:eigencam",
            needs=ACTIVATIONS,
            channels="component",
        ),
        Method(
            name="eigengradcam",
            summary="first principal component of activations times gradients",
            source=papers.ELEMENTWISE,
            cost="1",
            home="cam.methods.one_pass:eigengradcam",
            needs=GRADIENTS,
            channels="component",
        ),
        Method(
            name="kpcacam",
            summary="first component of kernel PCA of the activations; of no class",
            source=papers.KPCACAM,
            cost="1",
            home="cam.methods.one_pass:kpcacam",
            needs=ACTIVATIONS,
            channels="component",
        ),
        Method(
            name="fem",
            summary="where channels are two standard deviations above their mean; of no class",
            source=papers.FEM,
            cost="1",
            home="cam.methods.one_pass:fem",
            needs=ACTIVATIONS,
            channels="added",
        ),
        Method(
            name="smoothgradcam-pp",
            summary="Grad-CAM++ from derivatives that are averaged over noisy copies of the picture",
            source=papers.SMOOTHGRADCAM_PP,
            cost="1 + 20",
            home="cam.methods.perturbation:smooth_gradcam_pp",
            needs=(),
            channels="added",
            options={"samples": 20, "noise": 0.15, "seed": 0},
        ),
        Method(
            name="ablationcam",
            summary="channels weighted by how much of the score is lost without each of them",
            source=papers.ABLATIONCAM,
            cost="1 + tail x channels",
            home="cam.methods.perturbation:ablationcam",
            needs=(),
            channels="added",
            is_signed=True,
            assumes_positive=True,
        ),
        Method(
            name="reciprocam",
            summary="what the model scores where a small window of the activations is left alone",
            source=papers.RECIPROCAM,
            cost="1 + tail x places",
            home="cam.methods.perturbation:reciprocam",
            needs=(),
            is_signed=True,
            assumes_positive=True,
        ),
        Method(
            name="scorecam",
            summary="channels weighted by the score of the picture seen through each of them",
            source=papers.SCORECAM,
            cost="1 + channels",
            home="cam.methods.perturbation:scorecam",
            needs=(),
            channels="added",
            assumes_positive=True,
        ),
        Method(
            name="fasterscorecam",
            summary="Score-CAM of the ten channels that vary most",
            source=papers.FASTERSCORECAM,
            cost="1 + 10",
            home="cam.methods.perturbation:fasterscorecam",
            needs=(),
            channels="added",
            options={"channels": 10},
            assumes_positive=True,
        ),
        Method(
            name="sscam",
            summary="Score-CAM with scores averaged over masks with noise",
            source=papers.SSCAM,
            cost="1 + 35 x channels",
            home="cam.methods.perturbation:sscam",
            needs=(),
            channels="added",
            options={"samples": 35, "noise": 2.0, "seed": 0},
            assumes_positive=True,
        ),
        Method(
            name="iscam",
            summary="Score-CAM with scores averaged from an empty mask to the whole",
            source=papers.ISCAM,
            cost="1 + 10 x channels",
            home="cam.methods.perturbation:iscam",
            needs=(),
            channels="added",
            options={"steps": 10},
            assumes_positive=True,
        ),
        Method(
            name="rise",
            summary="the mean of random masks, weighted by the score of the picture seen through each; of no layer",
            source=papers.RISE,
            cost="1 + 4000",
            home="cam.methods.perturbation:rise",
            needs=(),
            is_signed=True,
            place="input",
            options={"masks": 4000, "cells": 7, "probability": 0.5, "seed": 0},
        ),
        Method(
            name="rollout",
            summary="attention of all a transformer's blocks, multiplied; of no layer and no class",
            source=papers.ROLLOUT,
            cost="1 + 1",
            home="cam.methods.attention:rollout",
            needs=(),
            place="attention",
        ),
        Method(
            name="gradient-rollout",
            summary="attention of all a transformer's blocks times its gradient, accumulated; of no layer",
            source=papers.GRADIENT_ROLLOUT,
            cost="1 + 1, and all blocks backwards for each class",
            home="cam.methods.attention:gradient_rollout",
            needs=(),
            place="attention",
        ),
        Method(
            name="legrad",
            summary="gradient at the attention of each of a transformer's blocks, of its own output's score; of no layer",
            source=papers.LEGRAD,
            cost="1 + 1, and all blocks backwards for each class",
            home="cam.methods.attention:legrad",
            needs=(),
            place="attention",
        ),
    )
}


ALIASES = {"chefer": "gradient-rollout"}  # what others call a method


def find_method(method: str | Method) -> Method:
    """The method of that name, or a method itself. Raises `GradcamError` for an unknown one, and offers the nearest.

    Case and hyphens do not count, `++` is understood for `-pp`, and so are `ALIASES`.
    """
    if isinstance(method, Method):
        return method
    name = _plain(method) if isinstance(method, str) else ""
    name = _plain(ALIASES.get(name, name))
    found = next((known for known in METHODS.values() if _plain(known.name) == name), None)
    if found is None:
        raise GradcamError(f"There is no method {shorten(method)}. {offer(name, METHODS)}")
    return found


def offer(
    name: str, known: Iterable[str], otherwise: str = "`gradcam methods` lists them, as gradcam.METHODS does."
) -> str:
    """What to say where nothing has that name: the nearest, if any looks like it, or where methods are listed."""
    offers = nearest(name, known)
    return f"Nearest: {join_names(offers)}." if offers else otherwise


def _plain(name: str) -> str:
    return name.lower().replace("++", "pp").replace("-", "")


def find_methods(methods: Iterable[str | Method]) -> list[Method]:
    """Each of them once. Raises `GradcamError` where one is unknown, and for what is no list of them."""
    is_list = isinstance(methods, Iterable) and not isinstance(methods, str)
    found = {method.name: method for method in map(find_method, methods)} if is_list else {}
    if not found:
        raise GradcamError(f"methods is {shorten(methods)}, expected a list of at least one name.")
    return list(found.values())


def smooth(methods: Sequence[Method], smoothing: str) -> list[Method]:
    """The methods with this smoothing. Raises `GradcamError` for an unknown one, and where a method cannot have it."""
    if not isinstance(smoothing, str) or smoothing not in SMOOTHINGS:
        raise GradcamError(f"smoothing is {shorten(smoothing)}, expected one of {join_names(SMOOTHINGS)}.")
    return [method.smoothed() for method in methods] if smoothing == "eigen" else list(methods)
