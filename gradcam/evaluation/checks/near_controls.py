"""Compare a heatmap with near controls: maps that are nearly right, such as the same map moved by one cell.

The far controls of a check cannot tell a map from a copy that is moved a little. Near controls need evidence that comes
from the model and not from the heatmap: random parts of the image are hidden, and the class's log-odds fall. A heatmap
predicts each fall by its mean value on the hidden pixels. A heatmap refutes a near control if its prediction correlates
with the measured falls better. Both correlations use the same masks, so Williams' paired test applies.

The falls of similar classes are alike, because hidden parts harm both. The heatmap of another class is therefore compared
by how the ratio of both classes' probabilities falls, which the difference of both heatmaps must predict.

Hiding parts of an image at random follows RISE (Petsiuk et al., BMVC 2018); correlating the falls with sums of the
heatmap is the faithfulness correlation of Bhatt et al., IJCAI 2020; the test is Williams, "The Comparison of Regression
Variables", Journal of the Royal Statistical Society B, 1959.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradcam.cam.explain import explain
from gradcam.errors import GradcamError, format_fields
from gradcam.evaluation.checks.control_maps import ControlMap, evaluate_covering, make_spectrum_noise, move_randomly
from gradcam.evaluation.checks.findings import TestResult
from gradcam.evaluation.checks.placement import EPSILON, fill_blur, replace_images
from gradcam.evaluation.metrics.soundness import find_rivals, rank_correlation
from gradcam.evaluation.subject import Subject, make_generator

MASKS = 96
WORD_MASKS = 192  # With words, the masks replace other measurements of the same cost.
MASK_BATCHES = 12  # steps of the progress
HIDDEN_SHARE = 0.3
RANDOM_CLASSES = 3  # number of random classes to compare, in addition to the rival class
RANDOM_NEAR_CLASSES = 2  # number of random classes among the near controls
CRITICAL_T = 1.661  # one-sided 5 % quantile of Student's t with MASKS - 3 degrees of freedom
CRITICAL_CLASS_T = 1.291  # the 10 % quantile, because the maps of all compared classes must be refuted
# All four directions must be refuted, at all larger displacements, too. At this value, at most 5 % of the maps that were
# moved by a cell or by an eighth were resolved too finely, on the half of the images that it was calibrated with.
CRITICAL_MOVED_T = 1.0
# A map that does better without its background contains noise, which its moved copies share. At these values, at most
# 10 % of the maps with half noise had too fine a resolution, on drawn scenes 200 to 439.
CRITICAL_BACKGROUND_T, BACKGROUND_SHARE = 2.0, 0.2
MIN_RATIO_PROBABILITY = 1e-30
MIN_MASK_CELLS, MAX_MASK_CELLS = 7, 14  # Smaller holes change the score of a large object too little.
MAX_GRID_CELLS = 32  # Maps of finer grids, such as gradients of pixels, are moved by eighths of the image.
DEFAULT_GRID = (8, 8)
FAR_SHARE = 1 / 3  # displacement of the far control "shifted"
EIGHTH = 1 / 8
DIRECTIONS = {"down": (1, 0), "up": (-1, 0), "right": (0, 1), "left": (0, -1)}
NUMBERS = {1: "one cell", 2: "two cells", 3: "three cells", 4: "four cells"}
SHAPES = {
    "mirrored about its centroid": "the heatmap rotated by 180 degrees about its centroid",
    "half noise": "the heatmap mixed with 50 % noise",
    "blob at maximum": "a blob at the heatmap's maximum",
}
BACKGROUND = "without background"

Grid = Sequence[int] | None  # the height and width of the layer's grid; None if it has no grid
EMPTY_RECORD: dict[str, Any] = {"resolution": None, "class_verified": None, "classes_compared": 0, "near_controls": []}


@dataclass(frozen=True)
class Displacement:
    """A distance on the image, in cells of the layer's grid and in pixels of the model's input.

    Attributes
    ----------
    cells : float
        Cells of the layer's grid; eighths of the image if the grid is unknown.
    pixels : int
        Pixels of the model's input, along its longer side.
    name : str
        The distance in words, such as "two cells".
    """

    cells: float
    pixels: int
    name: str

    @property
    def words(self) -> str:
        """Return the distance for use in a sentence, such as "two cells (64 pixels)"."""
        return f"{self.name} ({self.pixels} pixels)"


@dataclass(frozen=True)
class NearControl:
    """A near control, and how its agreement with the model's evidence compares with the heatmap's.

    Attributes
    ----------
    name : str
        Such as "down by 2 cells", "class 281" or "half noise".
    agreement : float
        The correlation of the control's predictions with the measured evidence, from -1 to 1.
    statistic : float
        Williams' t, above 0 if the heatmap agrees better than the control. For other classes, Student's t of the
        correlation between the ratio of the probabilities and the difference of the heatmaps.
    is_refuted : bool
        True if the heatmap agrees better: `statistic` is above a limit, which depends on the kind of control.
    """

    name: str
    agreement: float
    statistic: float
    is_refuted: bool

    __repr__ = format_fields

    @property
    def is_background_better(self) -> bool:
        """Return whether the control is the heatmap without its background, and agrees better than the heatmap."""
        return self.name == BACKGROUND and self.statistic < -CRITICAL_BACKGROUND_T


@dataclass(frozen=True)
class Evidence:
    """Falls of the class's log-odds (M,), and the masks (M,H,W) of the pixels that were hidden.

    `ratio_falls` (M,C) are the falls of the logarithm of the ratio of the class's probability to the probability of each
    class. All falls are float64, on the CPU.
    """

    masks: Tensor
    falls: Tensor
    ratio_falls: Tensor

    def predict(self, heatmaps: Tensor) -> Tensor:
        """Return the mean value (K,M) of each of K heatmaps on the hidden pixels of each mask."""
        masks = self.masks.flatten(1)
        return (heatmaps.to(masks).flatten(1) @ masks.T).cpu().double() / masks.shape[1]

    def find_best(self, heatmaps: Tensor) -> Tensor:
        """Return the heatmap (H,W) of K heatmaps (K,H,W) that agrees best with the falls."""
        correlations = torch.corrcoef(torch.cat([self.falls[None], self.predict(heatmaps)]))[0, 1:]
        return heatmaps[int(correlations.nan_to_num(-1.0).argmax())]


@dataclass(frozen=True)
class NearFindings:
    """The near controls of one heatmap. `resolution` and `class_verified` are as in `Verdict`."""

    controls: tuple[NearControl, ...]
    resolution: Displacement
    unresolved: Displacement | None
    unbeaten_classes: tuple[str, ...]
    classes_compared: int

    @property
    def class_verified(self) -> bool | None:
        """Return whether the maps of all other classes do worse; None if no other class was compared."""
        return not self.unbeaten_classes if self.classes_compared else None

    def to_record(self) -> dict[str, Any]:
        """Return the findings as record keys and values."""
        return {
            "resolution": dict(vars(self.resolution)),
            "class_verified": self.class_verified,
            "classes_compared": self.classes_compared,
            "near_controls": [dict(vars(control)) for control in self.controls],
        }

    @property
    def summary(self) -> str:
        """Return what the near controls show, in sentences."""
        unresolved = f"; a copy moved by {self.unresolved.words} is not" if self.unresolved else ""
        sentences = [f"A copy of the heatmap moved by {self.resolution.words} is clearly worse{unresolved}."]
        if self.class_verified:
            count = self.classes_compared
            others = "heatmap of 1 other class is" if count == 1 else f"heatmaps of {count} other classes are"
            sentences.append(f"The class is verified: the {others} worse.")
        elif self.unbeaten_classes:
            names = " or ".join(self.unbeaten_classes)
            sentences.append(f"The class is not verified: the heatmap is not better than the heatmap of {names}.")
        not_refuted = {control.name for control in self.controls if not control.is_refuted}
        if as_good := [words for name, words in SHAPES.items() if name in not_refuted]:
            sentences.append(f"The heatmap is not distinguished from {', '.join(as_good)}.")
        if any(control.is_background_better for control in self.controls):
            sentences.append(
                "Without its lowest values, the heatmap agrees better with the model, which suggests noise in the "
                "heatmap. A displacement by up to a third of the image is therefore possible."
            )
        return " ".join(sentences)


def find_grid(subject: Subject, layer: str | None, reshape: Any) -> tuple[int, ...] | None:
    """Return the height and width of the layer's grid; None if the layer has no grid, or one of single pixels."""
    index = int(subject.classes)
    try:
        maps = explain(subject.model, subject.images, layer, method="gradcam", target=index, reshape=reshape)
    except GradcamError:
        return None
    grid = tuple(maps.maps.shape[2:])
    return grid if len(grid) == 2 and max(grid) <= MAX_GRID_CELLS else None


def choose_rivals(subject: Subject, seed: int) -> tuple[int, ...]:
    """Return the most probable other class, and random classes."""
    generator, rival = make_generator(seed, "other classes"), int(find_rivals(subject))
    count = subject.all_probabilities.shape[1]
    shuffled = torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu").tolist()
    return (rival, *[index for index in shuffled if index not in (rival, int(subject.classes))][:RANDOM_CLASSES])


def choose_near_classes(subject: Subject, rivals: Sequence[int]) -> list[int]:
    """Return the rivals to compare as near controls, and both neighbours: a class index may be off by one."""
    index, count = int(subject.classes), subject.all_probabilities.shape[1]
    classes = (*rivals[: 1 + RANDOM_NEAR_CLASSES], (index + 1) % count, (index - 1) % count)
    return [i for i in dict.fromkeys(classes) if i != index]


def measure_evidence(
    subject: Subject, grid: Grid, seed: int, step: Callable[[], None] = lambda: None, *, count: int = MASKS
) -> Evidence:
    """Hide random parts of the subject's image (1,C,H,W) `count` times, and measure how the class's log-odds fall."""
    images, batches = subject.images, [subject.all_probabilities]
    masks = sample_masks(images.shape[2:], grid or DEFAULT_GRID, seed, count).to(images.device)
    blurred = fill_blur(images[0], masks[0], images)
    for batch in masks.split(count // MASK_BATCHES):
        batches.append(replace_images(subject, torch.where(batch[:, None], blurred, images)).all_probabilities)
        step()
    probabilities, index = torch.cat(batches).cpu().double(), int(subject.classes)
    log_odds = torch.logit(probabilities[:, index], eps=EPSILON)
    logs = probabilities.clamp(min=MIN_RATIO_PROBABILITY).log()
    ratios = logs[:, index, None] - logs
    return Evidence(masks.float(), log_odds[0] - log_odds[1:], ratios[0] - ratios[1:])


def sample_masks(size: Sequence[int], grid: Sequence[int], seed: int, count: int = MASKS) -> Tensor:
    """Return masks (`count`,H,W) of random cells. The cells of each mask start at a random offset."""
    generator = make_generator(seed, "hidden parts")
    cells = [min(max(length, MIN_MASK_CELLS), MAX_MASK_CELLS) for length in grid]
    steps = [-(-length // number) for length, number in zip(size, cells)]
    shape = (count, 1, *(number + 1 for number in cells))
    hidden = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") < HIDDEN_SHARE
    masks = F.interpolate(hidden.float(), [step * (number + 1) for step, number in zip(steps, cells)]) > 0
    offsets = [
        torch.randint(step, (count,), generator=generator, dtype=torch.int64, device="cpu").tolist() for step in steps
    ]
    crops = [mask[0, top : top + size[0], left : left + size[1]] for mask, top, left in zip(masks, *offsets)]
    return torch.stack(crops)


def compare_near(
    heatmap: Tensor, evidence: Evidence, grid: Grid, class_maps: Mapping[str, tuple[int, Tensor]], seed: int
) -> NearFindings:
    """Compare a heatmap (H,W) with its moved, mirrored and mixed copies, and with heatmaps of other classes.

    `class_maps` maps a name to a class and its heatmap (H,W). A displacement counts as refuted if all four directions are
    refuted, and all larger displacements, too.
    """
    displacements, cells = list_displacements(heatmap.shape, grid), grid or DEFAULT_GRID
    moved = {
        f"{direction} by {displacement.name}": move(heatmap, displacement.pixels / max(heatmap.shape), signs)
        for displacement in displacements
        for direction, signs in DIRECTIONS.items()
    }
    shapes = (mirror_about_centroid(heatmap), mix_with_noise(heatmap, seed), make_blob(heatmap, cells))
    controls = compare_agreement(evidence, heatmap, moved, CRITICAL_MOVED_T)[1:]
    shape_maps = {**dict(zip(SHAPES, shapes)), BACKGROUND: remove_background(heatmap)}
    controls += compare_agreement(evidence, heatmap, shape_maps)[1:]
    controls += [_compare_class(evidence, heatmap, name, *class_map) for name, class_map in class_maps.items()]
    refuted = {control.name for control in controls if control.is_refuted}
    far = round(FAR_SHARE * max(heatmap.shape))
    steps = [*displacements, Displacement(far / max(heatmap.shape) * max(cells), far, "a third of the image")]
    is_refuted = [all(f"{direction} by {step.name}" in refuted for direction in DIRECTIONS) for step in displacements]
    first = max((number for number, value in enumerate(is_refuted, 1) if not value), default=0)
    resolution = steps[-1] if any(control.is_background_better for control in controls) else steps[first]
    unbeaten = tuple(name for name in class_maps if name not in refuted)
    return NearFindings(tuple(controls), resolution, steps[first - 1] if first else None, unbeaten, len(class_maps))


def list_displacements(size: Sequence[int], grid: Sequence[int] | None) -> list[Displacement]:
    """Return the displacements of near controls, in rising order: whole cells and an eighth, below a third."""
    longest, count = max(size), max(grid or DEFAULT_GRID)
    shares = {number / count: NUMBERS[number] for number in NUMBERS if number / count < FAR_SHARE - 1e-3}
    shares.setdefault(EIGHTH, "an eighth of the image")
    return [Displacement(share * count, round(share * longest), name) for share, name in sorted(shares.items())]


def move(heatmap: Tensor, share: float, signs: tuple[int, int]) -> Tensor:
    """Return a heatmap (H,W), moved by a share of its height or width. Places that are left empty are 0."""
    down, across = (round(sign * share * length) for sign, length in zip(signs, heatmap.shape))
    return F.pad(heatmap, (across, -across, down, -down))


def mirror_about_centroid(heatmap: Tensor) -> Tensor:
    """Return a heatmap (H,W), turned by 180 degrees about the centroid of its positive values.

    Places whose source is outside the heatmap take the value at its border.
    """
    weights = heatmap.clamp(min=0).cpu().double()
    axes = [torch.arange(length, dtype=torch.float64, device="cpu") for length in heatmap.shape]
    sums = [weights.sum(1 - axis) for axis in (0, 1)]
    centres = [float((axis * s).sum() / s.sum().clamp(min=1e-12)) for axis, s in zip(axes, sums)]
    rows, columns = ((2 * c - axis).round().long().clamp(0, len(axis) - 1) for axis, c in zip(axes, centres))
    return heatmap[rows][:, columns]


def make_blob(heatmap: Tensor, grid: Sequence[int]) -> Tensor:
    """Return a Gaussian at the maximum, with the heatmap's positive mass and a standard deviation of one cell."""
    peak = divmod(int(heatmap.argmax()), heatmap.shape[1])
    rows, columns = (
        (((torch.arange(length, dtype=torch.float32, device=heatmap.device) - place) * cells / length) ** 2 / -2).exp()
        for length, place, cells in zip(heatmap.shape, peak, grid)
    )
    blob = rows[:, None] * columns
    return blob * (heatmap.clamp(min=0).sum() / blob.sum())


def mix_with_noise(heatmap: Tensor, seed: int) -> Tensor:
    """Return the mean of a heatmap (H,W) and noise with its spectrum, each divided by its standard deviation."""
    noise = make_spectrum_noise(heatmap, seed, "near")
    return heatmap / heatmap.std().clamp(min=1e-12) + noise / noise.std().clamp(min=1e-12)


def remove_background(heatmap: Tensor) -> Tensor:
    """Return a heatmap (H,W) minus its background, which is the value that a fifth of its pixels do not exceed.

    Values below the background become 0. If the background is not positive, the heatmap is returned as it is.
    """
    background = heatmap.flatten().kthvalue(max(1, round(BACKGROUND_SHARE * heatmap.numel()))).values
    return (heatmap - background).clamp(min=0) if background > 0 else heatmap


def compare_agreement(
    evidence: Evidence, heatmap: Tensor, maps: Mapping[str, Tensor], critical_t: float = CRITICAL_T
) -> list[Any]:
    """Return the heatmap's correlation with the evidence, followed by a `NearControl` for each map."""
    (_, agreement, *agreements), (_, _, *overlaps), *_ = _correlate(evidence, evidence.falls, [heatmap, *maps.values()])
    controls = []
    for name, value, alike in zip(maps, agreements, overlaps):
        statistic = compute_williams_t(agreement, value, alike, len(evidence.falls))
        controls.append(NearControl(name, value, statistic, agreement > 0 and statistic > critical_t))
    return [agreement, *controls]


def _compare_class(evidence: Evidence, heatmap: Tensor, name: str, index: int, class_map: Tensor) -> NearControl:
    falls = evidence.ratio_falls[:, index]
    (_, agreement, value), (*_, alike), _ = _correlate(evidence, falls, [heatmap, class_map])
    statistic = compute_difference_t(agreement, value, alike, len(falls))
    return NearControl(name, value, statistic, statistic > CRITICAL_CLASS_T)


def _correlate(evidence: Evidence, falls: Tensor, heatmaps: Sequence[Tensor]) -> Any:
    values = torch.cat([falls[None], evidence.predict(torch.stack([*heatmaps]))])
    return torch.corrcoef(values).nan_to_num().clamp(-1, 1).tolist()


def compare_word_maps(
    evidence: Evidence, heatmap: Tensor, maps: Mapping[str, Tensor], seed: int
) -> tuple[TestResult, tuple[ControlMap, ...]]:
    """Return the covering test of a word's heatmap (H,W), and its control maps: their agreement with the evidence."""
    positions = {f"position {number}": moved for number, moved in enumerate(move_randomly(heatmap, seed))}
    agreement, *comparisons = compare_agreement(evidence, heatmap, {**maps, **positions})
    moved_agreements = [comparison.agreement for comparison in comparisons[len(maps) :]]
    control_maps = torch.stack([*maps.values()])
    correlations = rank_correlation(heatmap.expand_as(control_maps), control_maps).tolist()
    controls = [
        ControlMap(near.name, None, near.agreement, alike, near.is_refuted, near.statistic < -CRITICAL_T, control)
        for near, alike, control in zip(comparisons, correlations, control_maps)
    ]
    describe = partial(_describe_agreement, len(evidence.falls))
    return evaluate_covering(agreement, controls, moved_agreements, describe), tuple(controls)


def _describe_agreement(count: int, agreement: float, best: ControlMap) -> str:
    return (
        f"Random parts of the image were hidden {count} times. The correlation between the heatmap on the hidden pixels "
        f"and the fall of the word's log-odds is {agreement:.2f}. The best control map, {best.words}, reaches "
        f"{best.effect:.2f}"
    )


def compute_williams_t(first: float, second: float, between: float, count: int) -> float:
    """Return Williams' t for the difference of two correlations with the same variable.

    `first` and `second` are the correlations with this variable, and `between` is their correlation with each other.
    """
    determinant = 1 - first**2 - second**2 - between**2 + 2 * first * second * between
    spread = 2 * max(determinant, 0) * (count - 1) / (count - 3) + ((first + second) / 2) ** 2 * (1 - between) ** 3
    return (first - second) * math.sqrt((count - 1) * (1 + between) / spread) if spread > EPSILON**2 else 0.0


def compute_difference_t(first: float, second: float, between: float, count: int) -> float:
    """Return Student's t for the correlation of a variable with the difference of two standardised variables.

    The arguments are as in `compute_williams_t`.
    """
    spread = 2 * (1 - between) - (first - second) ** 2
    return (first - second) * math.sqrt((count - 2) / spread) if spread > EPSILON**2 else 0.0
