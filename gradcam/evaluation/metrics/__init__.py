"""Every metric by name: what it measures, which direction is better, and where it is from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gradcam.cam.methods import papers
from gradcam.cam.methods.papers import Paper
from gradcam.cam.methods.table import offer
from gradcam.errors import GradcamError

# No torch is imported here: the shell reads its choices from this table before there is anything to compute.


Group = Literal["perturbation", "grid", "annotations", "soundness", "summary"]
GROUPS: tuple[Group, ...] = ("perturbation", "grid", "annotations", "soundness", "summary")


@dataclass(frozen=True)
class Metric:
    """One number of a map. `better`: which direction is. `group`: what is needed for it, and what it asks."""

    name: str
    summary: str
    better: Literal["higher", "lower"]
    group: Group
    source: Paper = field(repr=False)

    @property
    def arrow(self) -> str:
        """Up where higher is better, down where lower is."""
        return "↑" if self.better == "higher" else "↓"

    @property
    def paper(self) -> str:
        """Where it is from, in one line."""
        return str(self.source)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "average-drop",
            "share of the probability lost on picture times map",
            "lower",
            "perturbation",
            papers.GRADCAM_PP,
        ),
        Metric("increase", "how often picture times map is more probable", "higher", "perturbation", papers.GRADCAM_PP),
        Metric(
            "average-gain", "share of the doubt that picture times map removes", "higher", "perturbation", papers.GAIN
        ),
        Metric("insertion", "area under the probability as pixels appear", "higher", "perturbation", papers.RISE),
        Metric("deletion", "area under the probability as pixels vanish", "lower", "perturbation", papers.RISE),
        Metric("road", "least minus most relevant pixels imputed, halved", "higher", "perturbation", papers.ROAD),
        Metric(
            "sufficiency", "probability lost when only the top fifth is kept", "lower", "perturbation", papers.ERASER
        ),
        Metric("grid-mass", "map's mass in the class's own cell of a mosaic", "higher", "grid", papers.GRID),
        Metric("grid-maximum", "how often the maximum is in that cell", "higher", "grid", papers.GRID),
        Metric(
            "pointing-game",
            "how often the maximum is within 15 px of the object",
            "higher",
            "annotations",
            papers.POINTING,
        ),
        Metric("energy-pointing", "map's mass on the object", "higher", "annotations", papers.SCORECAM),
        Metric("iou", "overlap of the map's box with the object's", "higher", "annotations", papers.GRADCAM),
        Metric(
            "localisation-error", "how often that overlap is below one half", "lower", "annotations", papers.GRADCAM
        ),
        Metric(
            "randomisation", "rank correlation with maps of randomised weights", "lower", "soundness", papers.ADEBAYO
        ),
        Metric(
            "max-sensitivity", "largest relative change under small noise", "lower", "soundness", papers.SENSITIVITY
        ),
        Metric("class-difference", "how far the top two classes' maps differ", "higher", "soundness", papers.ADEBAYO),
        Metric("adcc", "harmonic mean of coherency, simplicity and confidence", "higher", "summary", papers.ADCC),
        Metric("coherency", "correlation with the map of picture times map", "higher", "summary", papers.ADCC),
        Metric("complexity", "mean of the map", "lower", "summary", papers.ADCC),
    )
}
DEFAULT = tuple(name for name, metric in METRICS.items() if metric.group in ("perturbation", "grid", "summary"))


def find_metrics(names: Sequence[str]) -> list[str]:
    """Metrics by their names, or by those of their groups, or "all"; each once, in the table's order.

    Raises `GradcamError`, with the nearest, for an unknown one.
    """
    found = set()
    for name in names:
        wanted = name.strip().lower()
        members = [it.name for it in METRICS.values() if wanted in ("all", it.group, it.name)]
        if not members:
            listed = f"There are {', '.join(METRICS)}; and all of a group: {', '.join((*GROUPS, 'all'))}."
            raise GradcamError(f"There is no metric {name!r}. {offer(name, [*METRICS, *GROUPS, 'all'], listed)}")
        found.update(members)
    return [name for name in METRICS if name in found]
