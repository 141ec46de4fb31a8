"""The table of metrics, with the meaning, the better direction, the source and the function of each metric."""

# The command line's help lists these metrics. This module does not import torch, because the import takes seconds.

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gradcam import plugins
from gradcam.cam.methods import papers
from gradcam.cam.methods.table import suggest_names
from gradcam.errors import GradcamError, shorten
from gradcam.options import import_function

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Metric:
    """A metric of a heatmap: its meaning, its inputs, and its cost.

    Attributes
    ----------
    name : str
        The metric's name.
    summary : str
        The measured quantity, in one line.
    better : str
        The better direction: "higher" or "lower".
    group : str
        The metric's group. The name of a group selects all of its metrics. Custom metrics are in the group "own".
    source : Paper or None
        The paper; None if there is none.
    function : str or callable
        A function that returns one number per image, (N,), or several numbers per image, (N,...), which are averaged. A
        string "module:name" names a function of this package. The function is imported on first use.
    needs : tuple of str
        The function's arguments, in order. "subject" is the `Subject`. "heatmaps" is a tensor (N,H,W), float32 in
        [0,1]. "explain" is the method as a function of a model, images and classes. "masks" and "boxes" come from the
        annotations, as in `Truth`. The name of a metric in `METRICS` stands for the numbers of this metric. "seed" is
        passed by keyword. "mosaic" stands for the heatmaps (M,4,H,W) of M mosaics, each of which has four classes.
    part : str
        The attribute of the function's result that holds the numbers; "" if the result itself holds the numbers.
    passes : int
        Forward passes per heatmap. Metrics with the same function share these passes.
    reruns : int
        How many times the metric runs the method again for each heatmap.
    by_order : bool
        True if only the order of the heatmap's values counts. Sharpening a heatmap, for example raising it to the eighth
        power, does not change such a metric. `scripts/measure_sharpening` measures how much sharpening changes the
        other metrics.

    Examples
    --------
    >>> from gradcam.evaluation import METRICS
    >>> metric = METRICS["insertion"]
    >>> metric.arrow, metric.needs, metric.is_of_mosaics
    ('↑', ('subject', 'heatmaps', 'seed'), False)
    >>> metric.needs_annotations, metric.paper
    (False, 'Petsiuk et al., RISE: ..., BMVC 2018')
    >>> metric.by_order, METRICS["grid-order"].by_order, METRICS["grid-mass"].by_order
    (True, True, False)
    >>> metric.compute.__name__, METRICS["average-drop"].key == METRICS["increase"].key  # two parts of one result
    ('insertion', True)
    """

    name: str
    summary: str
    better: Better
    group: str
    source: papers.Paper | None = field(repr=False)
    function: str | Callable[..., Any] = field(repr=False)
    needs: tuple[str, ...] = field(default=("subject", "heatmaps"), repr=False)
    part: str = field(default="", repr=False)
    passes: int = field(default=0, repr=False)
    reruns: int = field(default=0, repr=False)
    by_order: bool = field(default=False, repr=False)

    @property
    def arrow(self) -> str:
        """Return an arrow: up if higher is better, down if lower is better."""
        return "↑" if self.better == "higher" else "↓"

    @property
    def paper(self) -> str:
        """Return the paper as text; "" if there is none."""
        return str(self.source or "")

    @property
    def is_of_mosaics(self) -> bool:
        """Return True if the metric evaluates heatmaps of mosaics instead of heatmaps of single images."""
        return any(map(_is_of_mosaics, self.needs))

    @property
    def needs_annotations(self) -> bool:
        """Return True if the metric needs annotations of the objects."""
        inherited = [METRICS[need].needs_annotations for need in self.needs if need in METRICS]
        return any(inherited) or not {"masks", "boxes"}.isdisjoint(self.needs)

    @property
    def key(self) -> tuple[Any, ...]:
        """Return a key for caching. Metrics with equal keys are parts of the same result, computed by one call."""
        return (self.function if isinstance(self.function, str) else id(self.function), self.needs)

    @property
    def compute(self) -> Callable[..., Any]:
        """Return the function; import it if necessary."""
        return import_function(self.function, __package__)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.compute(*args, **options)


RANKING_NEEDS = ("subject", "heatmaps", "seed")  # The seed sets the random order of pixels with equal values.
# fmt: off
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("average-drop", "share of the probability lost when the image is multiplied by the heatmap", "lower",
               "perturbation", papers.GRADCAM_PP, "perturbation:confidence_change", part="drop", passes=1),
        Metric("increase", "how often multiplying the image by the heatmap raises the probability", "higher", "perturbation",
               papers.GRADCAM_PP, "perturbation:confidence_change", part="increase", passes=1),
        Metric("average-gain",
               "rise in probability when the image is multiplied by the heatmap, divided by the largest possible rise",
               "higher", "perturbation", papers.GAIN, "perturbation:confidence_change", part="gain", passes=1),
        Metric("insertion", "area under the probability curve as pixels are inserted, highest first", "higher",
               "perturbation", papers.RISE, "perturbation:insertion", RANKING_NEEDS, "areas", passes=49, by_order=True),
        Metric("deletion", "area under the probability curve as pixels are deleted, highest first", "lower",
               "perturbation", papers.RISE, "perturbation:deletion", RANKING_NEEDS, "areas", passes=49, by_order=True),
        Metric("road", "probability without the least relevant pixels minus probability without the most relevant pixels",
               "higher", "perturbation", papers.ROAD, "perturbation:road", RANKING_NEEDS, "combined", passes=18,
               by_order=True),
        Metric("sufficiency", "probability lost when only the top fifth of pixels is kept", "lower",
               "perturbation", papers.ERASER, "perturbation:sufficiency", RANKING_NEEDS, passes=1, by_order=True),
        Metric("grid-order", "how often the heatmap is higher in the class's cell of a mosaic than outside it", "higher",
               "grid", papers.ROC, "mosaic:grid_pointing_game", ("mosaic",), "order", by_order=True),
        Metric("grid-mass", "share of the heatmap's mass in the class's cell of a mosaic", "higher", "grid",
               papers.GRID, "mosaic:grid_pointing_game", ("mosaic",), "mass"),
        Metric("grid-maximum", "how often the heatmap's maximum is in the class's cell of a mosaic", "higher", "grid",
               papers.GRID, "mosaic:grid_pointing_game", ("mosaic",), "hits", by_order=True),
        Metric("box-order", "how often the heatmap is higher on the object than outside it", "higher", "annotations",
               papers.ROC, "localisation:order_pointing_game", ("heatmaps", "masks"), by_order=True),
        Metric("pointing-game", "how often the heatmap's maximum is within 15 px of the object", "higher", "annotations",
               papers.POINTING, "localisation:pointing_game", ("heatmaps", "masks"), by_order=True),
        Metric("energy-pointing", "share of the heatmap's mass on the object", "higher", "annotations",
               papers.SCORECAM, "localisation:energy_pointing_game", ("heatmaps", "masks")),
        Metric("iou", "overlap (IoU) of the heatmap's box with the object's box", "higher", "annotations",
               papers.GRADCAM, "localisation:localisation", ("heatmaps", "boxes"), "iou"),
        Metric("localisation-error", "how often the overlap (IoU) of the heatmap's box with the object's box is below 0.5",
               "lower", "annotations", papers.GRADCAM, "localisation:localisation", ("heatmaps", "boxes"), "errors"),
        Metric("corloc",
               "how often the heatmap's box overlaps the object by 0.5 or more (IoU), at a threshold chosen on other images",
               "higher", "annotations", papers.WSOL, "localisation:corloc", ("heatmaps", "boxes"), "hits"),
        Metric("randomisation", "rank correlation with the heatmaps of the model with randomised weights", "lower",
               "soundness", papers.ADEBAYO, "soundness:randomisation", ("subject", "explain", "heatmaps", "seed"),
               "correlations", reruns=8, by_order=True),
        Metric("max-sensitivity", "largest relative change of the heatmap when small noise is added to the image", "lower",
               "soundness", papers.SENSITIVITY, "soundness:max_sensitivity", ("subject", "explain", "heatmaps", "seed"),
               reruns=10),
        Metric("class-difference", "how much the heatmaps of the top two classes differ", "higher", "soundness",
               papers.ADEBAYO, "soundness:class_difference", ("subject", "explain", "heatmaps"), reruns=1, by_order=True),
        Metric("adcc", "harmonic mean of coherency, 1 - complexity and 1 - average drop", "higher", "summary",
               papers.ADCC, "perturbation:adcc", ("average-drop", "coherency", "complexity")),
        Metric("coherency", "how similar the heatmap remains when the image is multiplied by it", "higher", "summary",
               papers.ADCC, "perturbation:coherency", ("subject", "heatmaps", "explain"), reruns=1),
        Metric("complexity", "mean of the heatmap", "lower", "summary",
               papers.ADCC, "perturbation:complexity", ("heatmaps",)),
    )
}
# fmt: on
GROUPS = tuple(dict.fromkeys(metric.group for metric in METRICS.values()))
OPTIONAL_GROUPS = ("soundness", "annotations")  # These groups are slow, or need annotations.
DEFAULT_GROUPS = tuple(name for name, metric in METRICS.items() if metric.group not in OPTIONAL_GROUPS)


def metric(
    name: str, *, summary: str, better: Better, needs: Sequence[str] = ("subject", "heatmaps"), by_order: bool = False
) -> Callable[[Callable[..., Any]], Metric]:
    """Turn a function into a metric that you can pass to `evaluate`.

    Parameters
    ----------
    name : str
        The name in tables: letters, digits, "-" and "_".
    summary : str
        The measured quantity, in one line.
    better : str
        The better direction: "higher" or "lower".
    needs : sequence of str, default ("subject", "heatmaps")
        The function's arguments, in order, as in `Metric`. A metric with "masks" or "boxes" needs annotations.
    by_order : bool, default False
        True if only the order of the heatmap's values counts, as in `Metric`.

    Returns
    -------
    callable
        A decorator. With the default `needs`, the decorated function takes two arguments. The first argument is the
        `Subject`, which has N images, their classes and the model. The second argument is the heatmaps, float32 (N,H,W)
        in [0,1] on the images' device. The function returns a floating-point tensor or array (N,). `evaluate`
        passes one image at a time, so N is 1.

    Raises
    ------
    GradcamError
        If the name is invalid or already used by a metric or group, if `better` is neither "higher" nor "lower", if
        `needs` has an unknown name, or if "mosaic" is combined with other needs. The decorator also raises this error if
        the decorated object is not a function, or does not take the arguments in `needs`.

    Examples
    --------
    >>> from gradcam.evaluation import metric
    >>> @metric("spread", summary="share of the image that is at least half as bright as the maximum", better="lower")
    ... def spread(subject, heatmaps):
    ...     return (heatmaps >= 0.5).float().mean((1, 2))
    >>> spread.name, spread.arrow
    ('spread', '↓')
    """
    if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9][\w-]*", name, re.ASCII) is None:
        raise GradcamError(f"{shorten(name)} is not a valid metric name: use letters, digits, '-' and '_'.")
    if name.lower() in (*METRICS, *GROUPS, "all"):
        raise GradcamError(f"There is already a metric or group {name!r}: choose another name.")
    if better not in ("higher", "lower"):
        raise GradcamError(f"better= is {shorten(better)}, expected 'higher' or 'lower'.")
    valid_needs = ("subject", "heatmaps", "explain", "masks", "boxes", "seed", "mosaic", *METRICS)
    if isinstance(needs, str) or not needs or not all(need in valid_needs for need in needs):
        raise GradcamError(
            f"The needs of the metric {name!r} are {shorten(needs)}, expected some of {', '.join(valid_needs)}."
        )
    mosaic_needs = [need for need in needs if _is_of_mosaics(need)]
    if 0 < len(mosaic_needs) < len(needs):
        problem = f"needs {mosaic_needs[0]}, which is only computed for mosaics"
        raise GradcamError(f"The metric {name!r} {problem}: remove the other entries of needs=.")

    def to_metric(function: Callable[..., Any]) -> Metric:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            raise GradcamError(f"The metric {name!r} is {shorten(function)}, expected a function.") from None
        try:
            signature.bind(*(need for need in needs if need != "seed"), **({"seed": 0} if "seed" in needs else {}))
        except TypeError:
            expected = ", ".join(need.replace("-", "_") for need in needs)
            raise GradcamError(f"The metric {name!r} has the parameters {signature}, expected ({expected}).") from None
        return Metric(name, str(summary), better, "own", None, function, tuple(needs), by_order=by_order)

    return to_metric


def _is_of_mosaics(need: str) -> bool:
    return need == "mosaic" or (need in METRICS and METRICS[need].is_of_mosaics)


def find_metrics(metrics: Iterable[str | Metric]) -> list[Metric]:
    """Find metrics by name, group, "all" or `FILE.py:NAME`, without duplicates. `Metric` objects are accepted too.

    Metrics in `METRICS` come first, in the table's order. Raise `GradcamError` for unknown names, and for two different
    metrics of the same name.
    """
    selected: dict[str, Metric] = {}
    for choice in metrics:
        for metric in _select(choice):
            if selected.setdefault(metric.name, metric) != metric or METRICS.get(metric.name, metric) != metric:
                raise GradcamError(f"There are two metrics {metric.name!r}: rename one of them.")
    return [*(selected.pop(name) for name in METRICS if name in selected), *selected.values()]


def _select(choice: str | Metric) -> list[Metric]:
    name = choice.strip() if isinstance(choice, str) else ""
    members = [metric for metric in METRICS.values() if name.lower() in ("all", metric.group, metric.name)]
    if members:
        return members
    is_plugin = plugins.is_custom(name) or name in plugins.list_entry_points("metrics")
    loaded = plugins.load_plugin("metrics", name) if is_plugin else choice
    if isinstance(loaded, Metric):
        return [loaded]
    if is_plugin or callable(loaded):
        expected = "a function decorated with @gradcam.evaluation.metric"
        raise GradcamError(f"The metric {name or 'you gave'} is {shorten(loaded)}, expected {expected}.")
    names = [*METRICS, *GROUPS, "all", *plugins.list_entry_points("metrics")]
    choices = f"Metrics: {', '.join(METRICS)}. Groups: {', '.join((*GROUPS, 'all'))}."
    raise GradcamError(f"There is no metric {shorten(choice)}. {suggest_names(name, names, choices)}")
