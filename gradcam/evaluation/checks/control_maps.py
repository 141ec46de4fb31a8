"""Control maps of a check: heatmaps that do not explain the class, to compare with the checked heatmap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradcam.errors import format_fields
from gradcam.evaluation.checks.findings import Outcome, TestResult
from gradcam.evaluation.explainers import make_centre, make_edges
from gradcam.evaluation.subject import make_generator
from gradcam.options import keep_old_names

RIVAL, ANOTHER_WORD = "rival", "another word"
RIVALS = (RIVAL, ANOTHER_WORD)  # These control maps may be as good as the heatmap.
CONTROL_DESCRIPTIONS = {
    "mirrored": "the mirrored heatmap",
    "shifted": "the heatmap shifted by a third",
    "another image": "the heatmap of another image",
    RIVAL: "the heatmap of the most probable alternative",
    ANOTHER_WORD: "the heatmap of another word of the answer",
    "random weights": "the heatmap of a network with random weights",
    "noise": "smooth noise with the heatmap's spectrum",
    "centre": "a blob in the centre",
    "edges": "the image's edges",
}
MIN_EVIDENCE = 0.2  # If the drop in probability, or the share of the evidence, is smaller, the result is undecided.
SIGNIFICANCE_LEVEL = 0.05
# A heatmap beats a control map only if its area under the ROC curve (`order`), or its share of the evidence (`effect`),
# is larger by at least this gain.
MIN_ORDER_GAIN = 0.1
MIN_EFFECT_GAIN = 0.2
RANDOM_POSITIONS = 19  # By chance, the original position is better than nineteen others in one of twenty cases.


@keep_old_names
@dataclass(frozen=True, eq=False)
class ControlMap:
    """A control map (a heatmap that does not explain the class), and how it compares with the checked heatmap.

    Attributes
    ----------
    name : str
        "mirrored", "shifted", "another image", "rival" (for words, "another word"), "random weights", "noise", "centre"
        or "edges".
    order : float or None
        How well the control map ranks the image's pixels above the pixels of three other images: the area under the ROC
        curve, from 0 to 1; chance is 0.5. None if the image was tested alone.
    effect : float
        The share of the class's evidence on the pixels that the control map marks; 1 is all of the evidence. If the target
        is a word: the correlation of the control map with the evidence of random masks, from -1 to 1.
    alike : float
        The rank correlation of the control map with the checked heatmap, from -1 to 1.
    is_distinguished : bool
        True if the checked heatmap is better than the control map: by 0.1 in `order` or by 0.2 in `effect`. If the target
        is a word: significantly better in `effect` (Williams' test, 5 %).
    is_better : bool
        True if the control map is better than the checked heatmap: by 0.2 in `effect`, with an `order` that is not
        lower. If the target is a word: significantly better in `effect`.
    heatmap : Tensor (H,W)
        The control map of the first test image.

    Examples
    --------
    >>> import gradcam
    >>> verdict = gradcam.evaluation.check(gradcam.load_classifier(), "photos/coffee.jpg")
    >>> control: gradcam.evaluation.ControlMap = verdict.controls[0]
    >>> control.name, control.is_distinguished
    ('mirrored', True)
    """

    name: str
    order: float | None
    effect: float
    alike: float
    is_distinguished: bool
    is_better: bool
    heatmap: Tensor

    __repr__ = format_fields

    @property
    def words(self) -> str:
        """Return a description of the control map, for use in a sentence."""
        return CONTROL_DESCRIPTIONS[self.name]


Score = tuple[float | None, float]  # (order, effect)


def compare_with_control(name: str, control: Tensor, alike: float, scores: Score, control_scores: Score) -> ControlMap:
    """Compare a control map's scores with the heatmap's scores, and return the result as a `ControlMap`."""
    (order, effect), (control_order, control_effect) = scores, control_scores
    order_gain = 0.0 if order is None or control_order is None else order - control_order
    is_apart = effect - control_effect >= MIN_EFFECT_GAIN or order_gain >= MIN_ORDER_GAIN
    is_better = control_effect - effect >= MIN_EFFECT_GAIN and order_gain <= 0
    return ControlMap(name, control_order, control_effect, alike, is_apart and not is_better, is_better, control)


def make_control_maps(
    heatmaps: Tensor, images: Tensor, makers: Mapping[str, Callable[[], Tensor]], seed: int
) -> tuple[dict[str, Tensor], dict[str, Exception]]:
    """Return the control maps (4,H,W) by name, and the exceptions by name.

    `heatmaps` are the heatmaps of the test images (4,C,H,W). `makers` compute the control maps that need the model. If a
    maker raises an exception, the other control maps are still computed.
    """
    controls = {
        "mirrored": heatmaps.flip(2),
        "shifted": heatmaps.roll([round(length / 3) for length in heatmaps.shape[1:]], (1, 2)),
        "noise": make_spectrum_noise(heatmaps[0], seed).expand_as(heatmaps),
        "centre": make_centre(images),
        "edges": make_edges(images),
    }
    errors: dict[str, Exception] = {}
    for name, make in makers.items():
        try:
            controls[name] = make()
        except Exception as error:  # noqa: PERF203  (The model or a user's function may raise anything.)
            errors[name] = error
    return {name: controls[name] for name in CONTROL_DESCRIPTIONS if name in controls}, errors


def make_spectrum_noise(heatmap: Tensor, seed: int, *names: object) -> Tensor:
    """Return noise (H,W) with the spectrum of a heatmap (H,W), and random phases.

    The Fourier transform treats opposite edges of the heatmap as neighbours, which would create artificial edges. The
    heatmap is therefore mirrored at its edges first.
    """
    mirrored = torch.cat([heatmap, heatmap.flip(1)], 1)
    mirrored = torch.cat([mirrored, mirrored.flip(0)], 0)
    generator = make_generator(seed, "noise of a spectrum", *names)
    noise = torch.randn(mirrored.shape, generator=generator, dtype=torch.float32, device="cpu")
    phases = torch.fft.rfft2(noise.to(mirrored))
    spectrum = torch.fft.rfft2(mirrored).abs() * phases / phases.abs().clamp(min=1e-12)
    smooth_noise = torch.fft.irfft2(spectrum, s=mirrored.shape)[: heatmap.shape[0], : heatmap.shape[1]]
    return smooth_noise - smooth_noise.amin()


def move_randomly(heatmap: Tensor, seed: int) -> list[Tensor]:
    """Return copies of a heatmap (H,W), randomly shifted (with wrap-around) and randomly mirrored."""
    generator = make_generator(seed, "elsewhere")
    sample = partial(torch.randint, size=(1,), generator=generator, dtype=torch.int64, device="cpu")
    moved_maps = []
    for _ in range(RANDOM_POSITIONS):
        down, across, is_mirrored = (int(sample(high=limit)) for limit in (*heatmap.shape, 2))
        moved_maps.append((heatmap.flip(1) if is_mirrored else heatmap).roll((down, across), (0, 1)))
    return moved_maps


def describe_shares(effect: float, best: ControlMap) -> str:
    """Return a sentence about the shares of the evidence on the pixels that the heatmap and a control map mark."""
    reason = (
        f"{max(0.0, effect) * 100:.0f} % of the evidence for the class lies on the marked pixels. "
        f"The best control map, {best.words}, reaches {max(0.0, best.effect) * 100:.0f} %"
    )
    if best.is_distinguished and effect - best.effect < MIN_EFFECT_GAIN:
        reason += ", but this control map does not follow the image"
    return reason


def evaluate_covering(
    effect: float,
    controls: Sequence[ControlMap],
    moved_effects: Sequence[float],
    describe: Callable[[float, ControlMap], str] = describe_shares,
) -> TestResult:
    """Return the result of the covering test: the heatmap's evidence, beside the evidence of control maps.

    `describe` returns a sentence about the evidence of the heatmap and of the best control map.
    """
    # If only the rival's heatmap is better, the test does not fail, because similar classes may depend on the same
    # pixels.
    strict_controls = [control for control in controls if control.name not in RIVALS]
    reason = describe(effect, max(strict_controls, key=lambda control: control.effect))
    outcome: Outcome = "passed" if effect >= MIN_EVIDENCE else "undecided"
    if moved_effects:
        as_good, count = sum(value >= effect for value in moved_effects), len(moved_effects)
        reason += (
            f". Of {count} copies of the heatmap at random positions, {as_good} do at least as well as the heatmap"
        )
        outcome = outcome if (1 + as_good) / (1 + count) <= SIGNIFICANCE_LEVEL else "undecided"
    strictly_better = [control.words for control in strict_controls if control.is_better]
    equal = [control.words for control in strict_controls if not control.is_distinguished]
    if better := strictly_better or [control.words for control in controls if control.is_better]:
        outcome = "failed" if strictly_better else "undecided"
        reason += f". The heatmap is worse than {', '.join(better)}"
    elif equal:
        outcome = "undecided"
        reason += f". The heatmap is not better than {equal[0]}"
    return TestResult("covering", outcome, effect, f"{reason}.")
