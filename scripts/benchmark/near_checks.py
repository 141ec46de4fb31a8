"""Count how often the check of one image makes a wrong claim about a map that is nearly right, and a claim about Grad-CAM.

The images and models are those of `folder_checks`. The falls of the log-odds depend only on the image and the class, so
they are measured once for both, and all maps are compared with them. A full check is run only if this comparison makes a
claim, because a verdict without the claim cannot be wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmark.cases import ROOT
from benchmark.folder_checks import (
    IMAGES,
    QUANTILE,
    HeatmapFunction,
    crop_photographs,
    draw_images,
    load_drawn_classifier,
    offset_class,
)
from benchmark.measuring import Settings, report_progress
from benchmark.tables import Table

if TYPE_CHECKING:
    from gradcam import Classifier
    from gradcam.evaluation.checks.near_controls import NearFindings
    from gradcam.evaluation.checks.verdict import Verdict
    from gradcam.evaluation.subject import Subject

SEED, NOISE_SEED = 0, 50  # The check mixes noise with seed 0 itself, so the checked map has other noise.
FIRST_SCENE = 100  # The limits of the near controls were calibrated with scenes 0 to 79.
TRUE_MAP = "gradcam"
PASSED, RESOLVED, VERIFIED = "passed", "a resolution finer than a third of the image", "class verified"
TOO_FINE = "a resolution of the displacement or less"


@dataclass(frozen=True)
class NearCase:
    """A heatmap function that is nearly right. `displacement`, in pixels, is None for maps of another class."""

    title: str
    explain: HeatmapFunction
    displacement: float | None


@dataclass(frozen=True)
class Scene:
    """One image, and what all of its maps share: the evidence, the layer's grid, and the explained classes."""

    classifier: Classifier
    image: Any
    number: int
    subject: Subject
    grid: tuple[int, ...] | None
    evidence: Any
    classes: tuple[int, ...]
    explain: HeatmapFunction

    def compare(self, explain: HeatmapFunction) -> NearFindings:
        """Compare the map of a function with the near controls, as `check` does for passed maps."""
        from gradcam.evaluation.checks.near_controls import compare_near

        index = int(self.subject.classes)
        heatmap, *others = (self._explain(explain, i) for i in (index, *self.classes))
        class_maps = {str(i): (i, class_map) for i, class_map in zip(self.classes, others)}
        return compare_near(heatmap, self.evidence, self.grid, class_maps, SEED)

    def check(self, explain: HeatmapFunction) -> Verdict:
        """Run the whole check of a function."""
        from gradcam.evaluation import check

        target = int(self.subject.classes)
        return check(self.classifier, self.image, method=explain, target=target, seed=SEED)

    def _explain(self, explain: HeatmapFunction, index: int) -> Tensor:
        classes = torch.full_like(self.subject.classes, index)
        return explain(self.subject.model, self.subject.images, classes)[0].float()


def make_scene(classifier: Classifier, image: Any, number: int, target: int | None) -> Scene:
    """Measure the evidence of one image."""
    from gradcam.evaluation import Explainer, Subject
    from gradcam.evaluation.checks.near_controls import choose_near_classes, choose_rivals, find_grid, measure_evidence

    images = classifier.batch([classifier.prepare(image)])
    subject = Subject(classifier.model, images, target, activation=classifier.activation)
    grid = find_grid(subject, classifier.layer, None)
    explain = Explainer(("gradcam",), classifier.layer, activation=classifier.activation).only("gradcam")
    classes = tuple(choose_near_classes(subject, choose_rivals(subject, SEED)))
    evidence = measure_evidence(subject, grid, SEED)
    return Scene(classifier, image, number, subject, grid, evidence, classes, remember_maps(explain, subject))


def remember_maps(explain: HeatmapFunction, subject: Subject) -> HeatmapFunction:
    """Return a function that explains each class of the subject's image only once."""
    heatmaps: dict[int, Tensor] = {}

    def explain_once(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        if model is not subject.model or not torch.equal(images, subject.images):
            return explain(model, images, classes)
        index = int(classes)
        if index not in heatmaps:
            heatmaps[index] = explain(model, images, classes)
        return heatmaps[index].clone()

    return explain_once


def list_cases(scene: Scene) -> Iterator[NearCase]:
    """Yield the near controls of a scene as heatmap functions."""
    from gradcam.evaluation.checks.near_controls import (
        DEFAULT_GRID,
        DIRECTIONS,
        EIGHTH,
        make_blob,
        mirror_about_centroid,
        mix_with_noise,
        move,
    )

    explain, subject, longest = scene.explain, scene.subject, max(scene.subject.size[1:])
    grid, count = scene.grid or DEFAULT_GRID, subject.all_probabilities.shape[1]
    for title, share in (("moved by one cell", 1 / max(grid)), ("moved by an eighth", EIGHTH)):
        for signs in DIRECTIONS.values():
            yield NearCase(title, change(explain, lambda m, s=share, d=signs: move(m, s, d)), round(share * longest))
    shapes: dict[str, Callable[[Tensor], Tensor]] = {
        "rotated by 180 degrees": mirror_about_centroid,
        "half noise": lambda heatmap: mix_with_noise(heatmap, NOISE_SEED),
        "blob at maximum": lambda heatmap: make_blob(heatmap, grid),
    }
    heatmap = explain(subject.model, subject.images, subject.classes)[0]
    for title, function in shapes.items():
        yield NearCase(title, change(explain, function), measure_displacement(heatmap, function(heatmap), grid))
    offset = int(torch.randint(2, count - 1, (1,), generator=torch.Generator().manual_seed(scene.number)))
    yield NearCase("next class", offset_class(explain, 1), None)
    yield NearCase("rival class", swap_classes(explain, int(subject.classes), scene.classes[0]), None)
    yield NearCase("random class", offset_class(explain, offset), None)


def change(explain: HeatmapFunction, function: Callable[[Tensor], Tensor]) -> HeatmapFunction:
    return lambda model, images, classes: torch.stack([function(m) for m in explain(model, images, classes)])


def swap_classes(explain: HeatmapFunction, first: int, second: int) -> HeatmapFunction:
    """Return a function that confuses two classes."""

    def explain_swapped(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        swapped = torch.where(classes == first, second, torch.where(classes == second, first, classes))
        return explain(model, images, swapped)

    return explain_swapped


def measure_displacement(heatmap: Tensor, control: Tensor, grid: tuple[int, ...]) -> float:
    """Return the mean distance, in pixels, by which positive values move from a heatmap to a control (H,W).

    This is the Wasserstein distance of their means over the cells of the grid, each divided by its sum.
    """
    from scipy.stats import wasserstein_distance_nd

    steps = [length / cells for length, cells in zip(heatmap.shape, grid)]
    places = [(row * steps[0], column * steps[1]) for row in range(grid[0]) for column in range(grid[1])]
    weights = [F.adaptive_avg_pool2d(m.clamp(min=0)[None], grid).flatten().double().numpy() for m in (heatmap, control)]
    if min(values.sum() for values in weights) <= 0:
        return 0.0
    return float(wasserstein_distance_nd(places, places, *weights))


def find_claims(case: NearCase, findings: NearFindings | None) -> dict[str, bool]:
    """Return the wrong claims that findings could make about a control, and whether they make them."""
    if case.displacement is None:
        return {VERIFIED: bool(findings and findings.class_verified)}
    return {TOO_FINE: findings is not None and findings.resolution.pixels <= case.displacement}


def measure_scene(scene: Scene) -> Iterator[tuple[str, str, bool, float | None]]:
    """Yield a title, a claim, whether the verdict makes it, and the map's displacement, for each map of a scene."""
    from gradcam.evaluation.checks.near_controls import FAR_SHARE

    third = round(FAR_SHARE * max(scene.subject.size[1:]))
    verdict = scene.check(scene.explain)
    is_fine = verdict.resolution is not None and verdict.resolution.pixels < third
    for claim, is_made in {
        PASSED: verdict.near is not None,
        RESOLVED: is_fine,
        VERIFIED: verdict.class_verified,
    }.items():
        yield TRUE_MAP, claim, bool(is_made), None
    for case in list_cases(scene):
        claims = find_claims(case, scene.compare(case.explain))
        if any(claims.values()):
            claims = find_claims(case, scene.check(case.explain).near)
        for claim, is_made in claims.items():
            yield case.title, claim, is_made, case.displacement


def compare_near_checks(settings: Settings) -> Iterator[Table]:
    """Count the claims about each map, on the CPU only, because no time is measured."""
    import gradcam

    sys.path.insert(0, str(ROOT))  # Makes `tests` importable.
    drawn = draw_images(is_wide=False, first=FIRST_SCENE)
    models = [
        (gradcam.load_classifier(device="cpu"), crop_photographs(is_wide=False), False),
        (load_drawn_classifier(), drawn, True),
    ]
    rows, raw = [], []
    for classifier, images, is_drawn in models:
        results: dict[tuple[str, str], list[tuple[bool, float | None]]] = {}
        for number, image in enumerate(images):
            report_progress("nearchecks", classifier.name, str(number))
            scene = make_scene(classifier, image, number, (FIRST_SCENE + number) % 4 if is_drawn else None)
            for title, claim, is_made, displacement in measure_scene(scene):
                results.setdefault((title, claim), []).append((is_made, displacement))
        rows += [format_row(classifier.name, *key, values) for key, values in results.items()]
        raw += [
            {"model": classifier.name, "heatmap": title, "claim": claim, "values": values}
            for (title, claim), values in results.items()
        ]
    notes = [f"{IMAGES} images of each model; moved maps in four directions. Intervals of 95 %."]
    header = ["model", "heatmap", "displacement", "claim", "verdicts with the claim"]
    yield Table("nearchecks", "Claims about maps that are nearly right", header, rows, notes, raw)


def format_row(model: str, title: str, claim: str, values: list[tuple[bool, float | None]]) -> list[str]:
    """Return the median displacement, and the rate with Wilson's interval."""
    from gradcam.evaluation.intervals import wilson_interval

    count, total = sum(is_made for is_made, _ in values), len(values)
    low, high = wilson_interval(count / total, total, QUANTILE)
    distances = [distance for _, distance in values if distance is not None]
    displacement = f"{median(distances):.0f} pixels" if distances else "-"
    return [model, title, displacement, claim, f"{count} of {total} ({100 * low:.0f} % to {100 * high:.0f} %)"]
