"""Every metric by name: what it measures, which direction is better, where it is from, and how it is computed."""

# No torch is imported here: the shell reads its choices from this table before there is anything to compute.

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gradcam import plugins
from gradcam.cam.methods import papers
from gradcam.cam.methods.table import offer
from gradcam.errors import GradcamError, shorten

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Metric:
    """One number of a map: what it says, what it is computed of, and what that costs.

    Attributes
    ----------
    name : str
        What it is called.
    summary : str
        What it measures, in one line.
    better : str
        The better direction: "higher" or "lower".
    group : str
        What it asks. The names of groups stand for all of their metrics; "own" for those that users add.
    source : Paper or None
        Where it is from; None for what has no paper.
    function : str or callable
        Gives a number for each image, (N,), or several, (N,...), of which the mean is taken. "module:name" in this
        package is imported when it is first used.
    needs : tuple of str
        What the function is called with, in its order. Of a picture: "subject", the `Subject`; "heatmaps", float32
        (N,H,W) in [0,1]; "explain", the method itself, a function of a model, images and classes; "masks" and "boxes",
        of the annotations, as a `Truth` has them; the name of another metric, for its numbers; and "seed", by that
        keyword. Of a mosaic: "mosaic", the heatmaps (M,4,H,W) of its four classes.
    part : str
        The attribute of what the function gives that has the numbers, "" where these are all that it gives.
    passes : int
        Forward passes for one map, which metrics of one function share.
    reruns : int
        How often the method is run again for one map.
    by_order : bool
        Whether it looks at nothing but the order of a map's pixels, so that sharpening the map, such as raising it to
        the eighth power, changes nothing. What is not by order can be bought: `scripts/measure_sharpening` prints for
        how much.

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
        """Up where higher is better, down where lower is."""
        return "↑" if self.better == "higher" else "↓"

    @property
    def paper(self) -> str:
        """Where it is from, in words; "" for what has no paper."""
        return str(self.source or "")

    @property
    def is_of_mosaics(self) -> bool:
        """Whether it judges maps of mosaics; other metrics judge those of single pictures."""
        return any(need == "mosaic" or (need in METRICS and METRICS[need].is_of_mosaics) for need in self.needs)

    @property
    def needs_annotations(self) -> bool:
        """Whether it has to do with where objects are."""
        of_metrics = [METRICS[need].needs_annotations for need in self.needs if need in METRICS]
        return any(of_metrics) or not {"masks", "boxes"}.isdisjoint(self.needs)

    @property
    def key(self) -> tuple[Any, ...]:
        """What is the same for metrics that are parts of one result."""
        return (self.function if isinstance(self.function, str) else id(self.function), self.needs)

    @property
    def compute(self) -> Callable[..., Any]:
        """The function, imported."""
        return plugins.load_late(self.function, __package__)

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self.compute(*given, **options)


# fmt: off
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("average-drop", "share of the probability lost on picture times map", "lower", "perturbation",
               papers.GRADCAM_PP, "perturbation:confidence_change", part="drop", passes=1),
        Metric("increase", "how often picture times map is more probable", "higher", "perturbation",
               papers.GRADCAM_PP, "perturbation:confidence_change", part="increase", passes=1),
        Metric("average-gain", "share of the doubt that picture times map removes", "higher", "perturbation",
               papers.GAIN, "perturbation:confidence_change", part="gain", passes=1),
        Metric("insertion", "area under the probability as pixels appear", "higher", "perturbation",
               papers.RISE, "perturbation:insertion", ("subject", "heatmaps", "seed"), "areas", passes=49,
               by_order=True),
        Metric("deletion", "area under the probability as pixels vanish", "lower", "perturbation",
               papers.RISE, "perturbation:deletion", ("subject", "heatmaps", "seed"), "areas", passes=49,
               by_order=True),
        Metric("road", "least minus most relevant pixels imputed, halved", "higher", "perturbation",
               papers.ROAD, "perturbation:road", ("subject", "heatmaps", "seed"), "combined", passes=18,
               by_order=True),
        Metric("sufficiency", "probability lost when only the top fifth is kept", "lower", "perturbation",
               papers.ERASER, "perturbation:sufficiency", ("subject", "heatmaps", "seed"), passes=1, by_order=True),
        Metric("grid-order", "how often a pixel of the class's own cell has more than one of the others", "higher", "grid",
               papers.ROC, "grid:grid_pointing_game", ("mosaic",), "order", by_order=True),
        Metric("grid-mass", "map's mass in the class's own cell of a mosaic", "higher", "grid",
               papers.GRID, "grid:grid_pointing_game", ("mosaic",), "mass"),
        Metric("grid-maximum", "how often the maximum is in that cell", "higher", "grid",
               papers.GRID, "grid:grid_pointing_game", ("mosaic",), "hits", by_order=True),
        Metric("box-order", "how often a pixel of the object has more than one beside it", "higher", "annotations",
               papers.ROC, "localisation:order_pointing_game", ("heatmaps", "masks"), by_order=True),
        Metric("pointing-game", "how often the maximum is within 15 px of the object", "higher", "annotations",
               papers.POINTING, "localisation:pointing_game", ("heatmaps", "masks"), by_order=True),
        Metric("energy-pointing", "map's mass on the object", "higher", "annotations",
               papers.SCORECAM, "localisation:energy_pointing_game", ("heatmaps", "masks")),
        Metric("iou", "overlap of the map's box with the object's", "higher", "annotations",
               papers.GRADCAM, "localisation:localisation", ("heatmaps", "boxes"), "iou"),
        Metric("localisation-error", "how often that overlap is below one half", "lower", "annotations",
               papers.GRADCAM, "localisation:localisation", ("heatmaps", "boxes"), "errors"),
        Metric("randomisation", "rank correlation with maps of randomised weights", "lower", "soundness", papers.ADEBAYO,
               "soundness:randomisation", ("subject", "explain", "heatmaps", "seed"), "correlations", reruns=8,
               by_order=True),
        Metric("max-sensitivity", "largest relative change under small noise", "lower", "soundness", papers.SENSITIVITY,
               "soundness:max_sensitivity", ("subject", "explain", "heatmaps", "seed"), reruns=10),
        Metric("class-difference", "how far the top two classes' maps differ", "higher", "soundness",
               papers.ADEBAYO, "soundness:class_difference", ("subject", "explain", "heatmaps"), reruns=1, by_order=True),
        Metric("adcc", "harmonic mean of coherency, simplicity and confidence", "higher", "summary",
               papers.ADCC, "perturbation:adcc", ("average-drop", "coherency", "complexity")),
        Metric("coherency", "correlation with the map of picture times map", "higher", "summary",
               papers.ADCC, "perturbation:coherency", ("subject", "heatmaps", "explain"), reruns=1),
        Metric("complexity", "mean of the map", "lower", "summary",
               papers.ADCC, "perturbation:complexity", ("heatmaps",)),
    )
}
# fmt: on
GROUPS = tuple(dict.fromkeys(metric.group for metric in METRICS.values()))
NOT_ASKED = ("soundness", "annotations")  # groups that cost much, or need more than pictures
DEFAULT = tuple(name for name, metric in METRICS.items() if metric.group not in NOT_ASKED)


def metric(
    name: str,
    *,
    summary: str,
    better: Better,
    needs: Sequence[str] = ("subject", "heatmaps"),
    by_order: bool = False,
) -> Callable[[Callable[..., Any]], Metric]:
    """Make a metric of a function, to be passed wherever a metric is named.

    Parameters
    ----------
    name : str
        What it is called in tables: letters, digits, "-" and "_".
    summary : str
        What it measures, in one line.
    better : str
        The better direction: "higher" or "lower".
    needs : sequence of str, default ("subject", "heatmaps")
        What the function is called with, in its order, as `Metric` has it: with ("heatmaps", "masks") it has to do with
        where objects are, and takes annotations.
    by_order : bool, default False
        Whether it looks at nothing but the order of a map's pixels, as `Metric` has it.

    Returns
    -------
    callable
        A decorator. Its function takes the `Subject`, which holds N images, their classes and the model, and their
        heatmaps, float32 (N,H,W) in [0,1] on the images' device; it gives N numbers: a floating tensor or an array
        (N,). `evaluate` judges pictures one by one, so that N is 1.

    Raises
    ------
    GradcamError
        For a name of other characters, or that a metric or a group of them has already; for another direction; for
        needs that there are not, and for those of mosaics beside others. The decorator: for what is no function, and
        for another signature.

    Examples
    --------
    >>> from gradcam.evaluation import metric
    >>> @metric("spread", summary="share of the picture that is at least half as bright as the maximum", better="lower")
    ... def spread(subject, heatmaps):
    ...     return (heatmaps >= 0.5).float().mean((1, 2))
    >>> spread.name, spread.arrow
    ('spread', '↓')
    """
    if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9][\w-]*", name, re.ASCII) is None:
        raise GradcamError(f"A metric's name is of letters, digits, '-' and '_', and {shorten(name)} is not.")
    if name.lower() in (*METRICS, *GROUPS, "all"):
        raise GradcamError(f"There is a metric, or a group, {name!r} already: give yours another name.")
    if better not in ("higher", "lower"):
        raise GradcamError(f"better is {shorten(better)}, expected 'higher' or 'lower'.")
    known = ("subject", "heatmaps", "explain", "masks", "boxes", "seed", "mosaic", *METRICS)
    if isinstance(needs, str) or not needs or not all(need in known for need in needs):
        raise GradcamError(f"The metric {name!r} needs {shorten(needs)}, expected some of {', '.join(known)}.")

    of_mosaics = [need for need in needs if need == "mosaic" or (need in METRICS and METRICS[need].is_of_mosaics)]
    if 0 < len(of_mosaics) < len(needs):
        raise GradcamError(f"The metric {name!r} needs {of_mosaics[0]}, of mosaics, and nothing else can go with that.")

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


def find_metrics(metrics: Iterable[str | Metric]) -> list[Metric]:
    """Metrics by their names, groups, "all", `FILE.py:NAME`, or themselves; each once, those of the table first, in
    order. Raises `GradcamError` with the nearest for an unknown one, and for two metrics of one name."""
    found: dict[str, Metric] = {}
    for wanted in metrics:
        for each in _find(wanted):
            if found.setdefault(each.name, each) != each or METRICS.get(each.name, each) != each:
                raise GradcamError(f"There are two metrics {each.name!r}: give one of them another name.")
    return [*(found.pop(name) for name in METRICS if name in found), *found.values()]


def _find(wanted: str | Metric) -> list[Metric]:
    name = wanted.strip() if isinstance(wanted, str) else ""
    members = [it for it in METRICS.values() if name.lower() in ("all", it.group, it.name)]
    if members:
        return members
    is_brought = plugins.is_own(name) or name in plugins.installed("metrics")
    brought = plugins.load("metrics", name) if is_brought else wanted
    if isinstance(brought, Metric):
        return [brought]
    if is_brought or callable(brought):
        made = "what @gradcam.evaluation.metric makes of a function"
        raise GradcamError(f"The metric {name or 'that was given'} is {shorten(brought)}, expected {made}.")
    everything = [*METRICS, *GROUPS, "all", *plugins.installed("metrics")]
    listed = f"There are {', '.join(METRICS)}; and all of a group: {', '.join((*GROUPS, 'all'))}."
    raise GradcamError(f"There is no metric {shorten(wanted)}. {offer(name, everything, listed)}")
