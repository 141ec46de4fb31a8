"""Compare a heatmap with near controls: maps that are nearly right, such as the same map moved by one cell.

The far controls of a check cannot tell a map from a copy that is moved a little. Near controls need evidence that comes
from the model and not from the heatmap: random parts of the image are hidden, and the class's log-odds fall. A heatmap
predicts each fall by its mean value on the hidden pixels. A heatmap refutes a near control if its prediction correlates
with the measured falls significantly better. Both correlations use the same masks, so Williams' paired test applies.

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
from gradcam.evaluation.checks.placement import EPSILON, fill_blur
from gradcam.evaluation.metrics.soundness import rank_correlation
from gradcam.evaluation.subject import Subject, make_generator

MASKS = 96
WORD_MASKS = 192  # With words, the masks replace other measurements of the same cost.
MASK_BATCHES = 12  # steps of the progress
HIDDEN_SHARE = 0.3
CRITICAL_T = 1.661  # one-sided 5 % quantile of Student's t with MASKS - 3 degrees of freedom
MIN_MASK_CELLS, MAX_MASK_CELLS = 7, 14  # Smaller holes change the score of a large object too little.
MAX_GRID_CELLS = 32  # Maps of finer grids, such as gradients of pixels, are moved by eighths of the image.
DEFAULT_GRID = (8, 8)
FAR_SHARE = 1 / 3  # displacement of the far control "shifted"
EIGHTH = 1 / 8
DIRECTIONS = {"down": (1, 0), "up": (-1, 0), "right": (0, 1), "left": (0, -1)}
NUMBERS = {1: "one cell", 2: "two cells", 3: "three cells", 4: "four cells"}
SHAPES = {
    "mirrored about its centroid": "the heatmap mirrored about its centroid",
    "half noise": "the heatmap mixed with 50 % noise",
    "blob at maximum": "a blob at the heatmap's maximum",
}

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
        Williams' t, above 0 if the heatmap agrees better than the control.
    is_refuted : bool
        True if the heatmap agrees better at the 5 % level.
    """

    name: str
    agreement: float
    statistic: float
    is_refuted: bool

    __repr__ = format_fields

    @property
    def is_shape_as_good(self) -> bool:
        """Return whether the control has another shape, and cannot be distinguished from the heatmap."""
        return self.name in SHAPES and not self.is_refuted


@dataclass(frozen=True)
class Evidence:
    """Falls of the class's log-odds (M,), on the CPU, and the masks (M,H,W) of the pixels that were hidden."""

    masks: Tensor
    falls: Tensor

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
    agreement: float
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
        sentence = f"A map moved by {self.resolution.words} does worse"
        if self.unresolved:
            sentence += f"; one moved by {self.unresolved.words} cannot be distinguished"
        sentences = [f"{sentence}."]
        if self.class_verified:
            count = self.classes_compared
            sentences.append(f"The class is verified against {count} {'other' if count == 1 else 'others'}.")
        elif self.unbeaten_classes:
            names = ", ".join(self.unbeaten_classes)
            sentences.append(f"The class is not verified: the heatmap of {names} does not do worse.")
        if as_good := [SHAPES[control.name] for control in self.controls if control.is_shape_as_good]:
            sentences.append(f"The heatmap is not distinguished from {', '.join(as_good)}.")
        return " ".join(sentences)


def find_grid(subject: Subject, layer: str | None, reshape: Any) -> tuple[int, ...] | None:
    """Return the height and width of the layer's grid; None if the layer has no grid, or one of single pixels."""
    try:
        maps = explain(
            subject.model, subject.images, layer, method="gradcam", target=int(subject.classes), reshape=reshape
        )
    except GradcamError:
        return None
    grid = tuple(maps.maps.shape[2:])
    return grid if len(grid) == 2 and max(grid) <= MAX_GRID_CELLS else None


def measure_evidence(
    subject: Subject,
    grid: Sequence[int] | None,
    seed: int,
    step: Callable[[], None] = lambda: None,
    *,
    count: int = MASKS,
) -> Evidence:
    """Hide random parts of the subject's image (1,C,H,W) `count` times, and measure how the class's log-odds fall."""
    images = subject.images
    masks = sample_masks(images.shape[2:], grid or DEFAULT_GRID, seed, count).to(images.device)
    blurred, probabilities = fill_blur(images[0], masks[0], images), [subject.probabilities[None]]
    for batch in masks.split(count // MASK_BATCHES):
        probabilities.append(subject.score(torch.where(mask, blurred, images) for mask in batch))
        step()
    log_odds = torch.logit(torch.cat(probabilities)[:, 0].cpu().double(), eps=EPSILON)
    return Evidence(masks.float(), log_odds[0] - log_odds[1:])


def sample_masks(size: Sequence[int], grid: Sequence[int], seed: int, count: int = MASKS) -> Tensor:
    """Return masks (`count`,H,W) of random cells. The cells of each mask start at a random offset."""
    generator = make_generator(seed, "hidden parts")
    cells = [min(max(length, MIN_MASK_CELLS), MAX_MASK_CELLS) for length in grid]
    steps = [-(-length // number) for length, number in zip(size, cells)]
    values = torch.rand(
        (count, 1, *(number + 1 for number in cells)), generator=generator, dtype=torch.float32, device="cpu"
    )
    hidden = values < HIDDEN_SHARE
    masks = F.interpolate(hidden.float(), [step * (number + 1) for step, number in zip(steps, cells)]) > 0
    offsets = [
        torch.randint(step, (count,), generator=generator, dtype=torch.int64, device="cpu").tolist() for step in steps
    ]
    crops = [mask[0, top : top + size[0], left : left + size[1]] for mask, top, left in zip(masks, *offsets)]
    return torch.stack(crops)


def compare_near(
    heatmap: Tensor, evidence: Evidence, grid: Sequence[int] | None, class_maps: Mapping[str, Tensor], seed: int
) -> NearFindings:
    """Compare a heatmap (H,W) with its moved, mirrored and mixed copies, and with heatmaps (H,W) of other classes.

    A displacement counts as refuted if all four directions are refuted, and all larger displacements, too.
    """
    displacements = list_displacements(heatmap.shape, grid)
    moved = {
        f"{direction} by {displacement.name}": move(heatmap, displacement.pixels / max(heatmap.shape), signs)
        for displacement in displacements
        for direction, signs in DIRECTIONS.items()
    }
    maps = {**moved, **_make_shapes(heatmap, grid or DEFAULT_GRID, seed), **class_maps}
    agreement, *controls = compare_agreement(evidence, heatmap, maps)
    refuted = {control.name for control in controls if control.is_refuted}
    far = round(FAR_SHARE * max(heatmap.shape))
    resolution = Displacement(_to_cells(far, heatmap.shape, grid), far, "a third of the image")
    unresolved = None
    for displacement in reversed(displacements):
        if any(f"{direction} by {displacement.name}" not in refuted for direction in DIRECTIONS):
            unresolved = displacement
            break
        resolution = displacement
    unbeaten = tuple(name for name in class_maps if name not in refuted)
    return NearFindings(tuple(controls), agreement, resolution, unresolved, unbeaten, len(class_maps))


def list_displacements(size: Sequence[int], grid: Sequence[int] | None) -> list[Displacement]:
    """Return the displacements of near controls, in rising order: whole cells and an eighth, below a third."""
    longest, count = max(size), max(grid or DEFAULT_GRID)
    shares = {number / count: NUMBERS[number] for number in NUMBERS if number / count < FAR_SHARE - 1e-3}
    shares.setdefault(EIGHTH, "an eighth of the image")
    return [Displacement(share * count, round(share * longest), name) for share, name in sorted(shares.items())]


def move(heatmap: Tensor, share: float, signs: tuple[int, int]) -> Tensor:
    """Return a heatmap (H,W), moved by a share of its height or width. Values at the border are repeated."""
    down, across = (round(sign * share * length) for sign, length in zip(signs, heatmap.shape))
    return take(
        heatmap, [torch.arange(n, dtype=torch.int64, device="cpu") - d for n, d in zip(heatmap.shape, (down, across))]
    )


def take(heatmap: Tensor, positions: Sequence[Tensor]) -> Tensor:
    """Return the values of a heatmap (H,W) at rows and columns; positions outside take the value at the border."""
    rows, columns = (
        position.clamp(0, length - 1).to(heatmap.device) for position, length in zip(positions, heatmap.shape)
    )
    return heatmap[rows][:, columns]


def mirror_about_centroid(heatmap: Tensor) -> Tensor:
    """Return a heatmap (H,W), turned by 180 degrees about the centroid of its positive values."""
    weights = heatmap.clamp(min=0).cpu().double()
    axes = [torch.arange(length, dtype=torch.float64, device="cpu") for length in heatmap.shape]
    sums = [weights.sum(1 - axis) for axis in (0, 1)]
    centres = [float((axis * s).sum() / s.sum().clamp(min=1e-12)) for axis, s in zip(axes, sums)]
    return take(heatmap, [(2 * centre - axis).round().long() for axis, centre in zip(axes, centres)])


def make_blob(heatmap: Tensor, grid: Sequence[int]) -> Tensor:
    """Return a Gaussian at the maximum, with the heatmap's positive mass and a standard deviation of one cell."""
    peak = divmod(int(heatmap.argmax()), heatmap.shape[1])
    rows, columns = (
        torch.exp(
            -(((torch.arange(length, dtype=torch.float32, device=heatmap.device) - place) * cells / length) ** 2) / 2
        )
        for length, place, cells in zip(heatmap.shape, peak, grid)
    )
    blob = rows[:, None] * columns
    return blob * (heatmap.clamp(min=0).sum() / blob.sum())


def mix_with_noise(heatmap: Tensor, seed: int) -> Tensor:
    """Return the mean of a heatmap (H,W) and noise with its spectrum, each divided by its standard deviation."""
    noise = make_spectrum_noise(heatmap, seed, "near")
    return heatmap / heatmap.std().clamp(min=1e-12) + noise / noise.std().clamp(min=1e-12)


def _make_shapes(heatmap: Tensor, grid: Sequence[int], seed: int) -> dict[str, Tensor]:
    maps = (mirror_about_centroid(heatmap), mix_with_noise(heatmap, seed), make_blob(heatmap, grid))
    return dict(zip(SHAPES, maps))


def compare_agreement(evidence: Evidence, heatmap: Tensor, maps: Mapping[str, Tensor]) -> list[Any]:
    """Return the heatmap's correlation with the evidence, followed by a `NearControl` for each map."""
    predictions = evidence.predict(torch.stack([heatmap, *maps.values()]))
    correlations = torch.corrcoef(torch.cat([evidence.falls[None], predictions])).nan_to_num().clamp(-1, 1).tolist()
    agreement, *control_agreements = correlations[0][1:]
    controls = []
    for name, value, alike in zip(maps, control_agreements, correlations[1][2:]):
        statistic = compute_williams_t(agreement, value, alike, len(evidence.falls))
        controls.append(NearControl(name, value, statistic, agreement > 0 and statistic > CRITICAL_T))
    return [agreement, *controls]


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
        f"Random parts of the image were hidden {count} times. The correlation of the heatmap on the hidden pixels "
        f"with the fall of the word's log-odds is {agreement:.2f}. The best control map, {best.words}, reaches "
        f"{best.effect:.2f}"
    )


def compute_williams_t(first: float, second: float, between: float, count: int) -> float:
    """Return Williams' t for the difference of two correlations with the same variable.

    `first` and `second` are the correlations with this variable, and `between` is their correlation with each other.
    """
    determinant = 1 - first**2 - second**2 - between**2 + 2 * first * second * between
    spread = 2 * max(determinant, 0) * (count - 1) / (count - 3) + ((first + second) / 2) ** 2 * (1 - between) ** 3
    return (first - second) * math.sqrt((count - 1) * (1 + between) / spread) if spread > EPSILON**2 else 0.0


def _to_cells(pixels: int, size: Sequence[int], grid: Sequence[int] | None) -> float:
    return pixels / max(size) * max(grid or DEFAULT_GRID)
