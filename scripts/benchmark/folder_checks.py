"""Count how often the verdict over a set of images finds the bugs of pipelines, and names them rightly.

Each bug is computed once on 60 images of two models. Then 200 sets of 12 images are drawn from them. The images are
photographs, crops of photographs, and drawn scenes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from benchmark.cases import ROOT
from benchmark.measuring import Settings, report_progress
from benchmark.tables import Table

if TYPE_CHECKING:
    from gradcam import Classifier
    from gradcam.evaluation.checks.map_evidence import MapEvidence

IMAGES, SETS, SET_SIZE, SEED = 60, 200, 12, 50
PHOTOGRAPHS = (
    "astronaut.jpg", "camera.png", "cat_and_espresso.jpg", "chelsea.jpg", "china.jpg", "coffee.jpg", "crocodile.webp",
    "flower.jpg", "koala.webp", "komodo_dragon.webp", "lemur.webp", "macaw.webp", "panda.webp", "polar_bear.webp",
    "rocket.jpg",
)  # fmt: skip
QUANTILE = NormalDist().inv_cdf(0.975)
HeatmapFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class BugCase:
    """A heatmap function with a bug, the kind under which the bug must be reported, and where the bug is.

    `kind` is None for functions without a bug. `is_reversed` is True if the images are read in BGR order.
    """

    title: str
    kind: str | None
    make: Callable[[HeatmapFunction, tuple[int, int]], HeatmapFunction]
    method: str = "gradcam"
    is_wide: bool = False
    is_reversed: bool = False
    words: str = ""


def list_cases() -> list[BugCase]:
    cases = [BugCase(method, None, keep, method) for method in ("gradcam", "layercam", "hirescam", "gradcam++")]
    return [
        *cases,
        BugCase("nearest-neighbour interpolation", None, resize_nearest),
        BugCase("moved by one cell", "displaced", move_by_cell, words="right"),
        BugCase("moved by an eighth", "displaced", move_by_eighth, words="down"),
        BugCase("next class index", "class", explain_next_class, words="+1"),
        BugCase("previous class index", "class", explain_previous_class, words="-1"),
        BugCase("x and y swapped", "swapped", swap_axes),
        BugCase("mirrored", "mirrored", mirror),
        BugCase("BGR in the function", "colour", explain_bgr),
        BugCase("no normalisation in the function", "normalisation", explain_unscaled),
        BugCase("centre crop, stretched", "crop", stretch_crop, is_wide=True),
        BugCase("80 % crop, stretched", "crop", stretch_smaller_crop, is_wide=True),
        BugCase("BGR in the preprocessing", "colour", keep, is_reversed=True),
    ]


def keep(explain: HeatmapFunction, cells: tuple[int, int]) -> HeatmapFunction:
    return explain


def translate(heatmaps: Tensor, across: int, down: int) -> Tensor:
    """Move heatmaps (N,H,W) to the right and down by pixels, and fill with zeros."""
    height, width = heatmaps.shape[1:]
    return F.pad(heatmaps, (across, 0, down, 0))[:, :height, :width]


def move_by_cell(explain: HeatmapFunction, cells: tuple[int, int]) -> HeatmapFunction:
    return lambda model, images, classes: translate(
        explain(model, images, classes), round(images.shape[3] / cells[1]), 0
    )


def move_by_eighth(explain: HeatmapFunction, cells: tuple[int, int]) -> HeatmapFunction:
    return lambda model, images, classes: translate(explain(model, images, classes), 0, images.shape[2] // 8)


def offset_class(explain: HeatmapFunction, offset: int) -> HeatmapFunction:
    return lambda model, images, classes: explain(model, images, (classes + offset) % model(images).shape[1])


def explain_next_class(explain: HeatmapFunction, cells: tuple[int, int]) -> HeatmapFunction:
    return offset_class(explain, 1)


def explain_previous_class(explain: HeatmapFunction, cells: tuple[int, int]) -> HeatmapFunction:
    return offset_class(explain, -1)


def stretch(explain: HeatmapFunction, share: float) -> HeatmapFunction:
    """Return a function that explains a square centre crop, and stretches its map over the whole image."""

    def explain_crop(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        height, width = images.shape[2:]
        side = round(share * min(height, width))
        top, left = (height - side) // 2, (width - side) // 2
        heatmaps = explain(model, images[:, :, top : top + side, left : left + side], classes)
        return F.interpolate(heatmaps[:, None], (height, width), mode="bilinear", align_corners=False)[:, 0]

    return explain_crop


def stretch_crop(explain: HeatmapFunction, cells: tuple[int, int]) -> HeatmapFunction:
    return stretch(explain, 0.875)


def stretch_smaller_crop(explain: HeatmapFunction, cells: tuple[int, int]) -> HeatmapFunction:
    return stretch(explain, 0.8)


def swap_axes(explain: HeatmapFunction, cells: tuple[int, int]) -> HeatmapFunction:
    return lambda model, images, classes: explain(model, images, classes).mT.contiguous()


def mirror(explain: HeatmapFunction, cells: tuple[int, int]) -> HeatmapFunction:
    return lambda model, images, classes: explain(model, images, classes).flip(2)


def explain_bgr(explain: HeatmapFunction, cells: tuple[int, int]) -> HeatmapFunction:
    return lambda model, images, classes: explain(model, images.flip(1), classes)


def explain_unscaled(explain: HeatmapFunction, cells: tuple[int, int]) -> HeatmapFunction:
    return lambda model, images, classes: explain(
        model, (images - images.amin()) / (images.amax() - images.amin()), classes
    )


def resize_nearest(explain: HeatmapFunction, cells: tuple[int, int]) -> HeatmapFunction:
    def explain_coarsely(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        maps = F.adaptive_avg_pool2d(explain(model, images, classes)[:, None], cells)
        return F.interpolate(maps, images.shape[2:], mode="nearest")[:, 0]

    return explain_coarsely


def crop_photographs(*, is_wide: bool) -> list[Any]:
    """Return parts of photographs: random squares, or random rectangles of 3:2 to 2:1 if `is_wide`."""
    from gradcam import read_image

    rng, images = np.random.default_rng([SEED, is_wide]), []
    for number in range(IMAGES):
        image = read_image(ROOT / "assets" / PHOTOGRAPHS[number % len(PHOTOGRAPHS)])
        ratio = rng.uniform(1.5, 2.0) if is_wide else 1.0
        height = int(min(image.shape[0], image.shape[1] / ratio) * rng.uniform(0.75, 1.0))
        width = int(height * ratio)
        top, left = (int(rng.integers(0, whole - side + 1)) for whole, side in zip(image.shape, (height, width)))
        images.append(image[top : top + height, left : left + width].copy())
    return images


def draw_images(*, is_wide: bool, first: int = 0) -> list[Any]:
    """Return scenes with one shape of known colour: 96 x 96, or 160 x 96 if `is_wide`. `first` is the first scene."""
    from tests.drawn import pictures

    images = []
    for number in range(first, first + IMAGES):
        rng = np.random.default_rng([8, number])
        colour = number % 4
        if not is_wide:
            images.append(pictures.draw_scene(rng, things=[pictures.ShapeSpec(colour=colour)]).picture)
            continue
        size, radius = (96, 160), rng.uniform(8, 17)
        background = pictures.draw_background(rng, pictures.TESTING, 160)[32:128]
        across, down = rng.uniform(radius + 2, 158 - radius), rng.uniform(radius + 2, 94 - radius)
        cover = pictures.cover_shape(int(rng.integers(6)), across, down, radius, rng.uniform(-0.35, 0.35), size=size)
        painted = pictures.paint_shape(rng, background, cover, colour)
        images.append(painted.clip(0, 255).astype(np.uint8))
    return images


def load_drawn_classifier() -> Classifier:
    from gradcam import Classifier
    from gradcam.models.preprocess import Preprocessing
    from tests.drawn import classifier

    size = (96, 96)
    preprocess = Preprocessing(size, size, classifier.MEAN, classifier.STD, "bilinear")
    return Classifier("drawn scenes", classifier.make(), preprocess, 4, classifier.CLASSES, "0")


def measure_all(classifier: Classifier, draw: Callable[..., list[Any]]) -> Iterator[tuple[BugCase, list[MapEvidence]]]:
    """Yield each case, and its evidence on all images. The exact maps are computed once per image.

    The classes of drawn scenes are known, and are passed as targets.
    """
    from gradcam.cam.methods.table import find_method
    from gradcam.evaluation import Explainer
    from gradcam.evaluation.checks.map_evidence import compute_exact_maps

    cases = list_cases()
    evidence: dict[str, list[MapEvidence]] = {case.title: [] for case in cases}
    explainer = Explainer(("gradcam",), classifier.layer, activation=classifier.activation)
    for is_wide, is_reversed in ((False, False), (True, False), (False, True)):
        selected = [case for case in cases if (case.is_wide, case.is_reversed) == (is_wide, is_reversed)]
        fitted = replace(classifier, fit="whole") if is_wide else classifier
        for number, image in enumerate(draw(is_wide=is_wide)):
            report_progress("folderchecks", classifier.name, str(number))
            prepared = fitted.prepare(image[..., ::-1].copy() if is_reversed else image)
            target = number % 4 if draw is draw_images else None
            exact = compute_exact_maps(fitted, prepared, explainer, target)
            subject = exact.subject
            for case in selected:
                source = find_method(case.method)
                explain = replace(explainer, names=(source,)).only(source.name)
                function = case.make(explain, exact.evidence.cells)
                evidence[case.title].append(exact.compare(function(subject.model, subject.images, subject.classes)))
        yield from ((case, evidence[case.title]) for case in selected)


def count_sets(case: BugCase, evidence: Sequence[MapEvidence]) -> tuple[int, int]:
    """Return the number of sets in which a bug was found, and in which the bug was named rightly."""
    from gradcam.evaluation.checks.folder import FolderVerdict

    rng = np.random.default_rng(SEED)
    found_count = named_count = 0
    for _ in range(SETS):
        chosen_items = tuple(evidence[i] for i in rng.choice(len(evidence), SET_SIZE, replace=False))
        bugs = FolderVerdict((), chosen_items).bugs
        found_count += bool(bugs)
        named_count += any(bug.kind == case.kind and case.words in bug.text for bug in bugs)
    return found_count, named_count


def format_rate(count: int) -> str:
    """Return a count of the sets, and Wilson's interval of the rate."""
    from gradcam.evaluation.intervals import wilson_interval

    low, high = wilson_interval(count / SETS, SETS, QUANTILE)
    return f"{count} of {SETS} ({100 * low:.0f} % to {100 * high:.0f} %)"


def compare_folder_checks(settings: Settings) -> Iterator[Table]:
    """Count the sets with a finding for each bug, on the CPU only, because no time is measured."""
    import gradcam

    sys.path.insert(0, str(ROOT))  # Makes `tests` importable.
    models = [(gradcam.load_classifier(device="cpu"), crop_photographs), (load_drawn_classifier(), draw_images)]
    rows, raw = [], []
    for classifier, draw in models:
        for case, evidence in measure_all(classifier, draw):
            reported, named = count_sets(case, evidence)
            clean = SETS - reported
            result = (
                [format_rate(clean), "-", "-"] if case.kind is None else ["-", *map(format_rate, (reported, named))]
            )
            rows.append([classifier.name, case.title, *result])
            report_progress("folderchecks", *rows[-1])  # An interrupted run keeps the rows that are complete.
            raw.append({"model": classifier.name, "case": case.title, "reported": reported, "named": named})
    notes = [f"{IMAGES} images for each row, and {SETS} sets of {SET_SIZE} images drawn from them. Intervals of 95 %."]
    header = ["model", "heatmaps", "no bug reported", "a bug reported", "the right bug reported"]
    yield Table("folderchecks", "Verdicts over sets of images", header, rows, notes, raw)
