"""What a map has to be told apart from: maps that look like it, and explain nothing, or something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradcam.errors import show_fields
from gradcam.evaluation.explainers import make_centre, make_edges
from gradcam.evaluation.subject import draw
from gradcam.options import keep_old_names

RIVAL = "rival"
SHAMS = {  # by name, in words
    "mirrored": "the mirrored heatmap",
    "shifted": "the heatmap shifted by a third",
    "another image": "the heatmap of another image",
    RIVAL: "the heatmap of the rival class",
    "random weights": "the heatmap of a network with random weights",
    "noise": "smooth noise with the heatmap's spectrum",
    "centre": "a blob in the centre",
    "edges": "the image's edges",
}
ORDER = 0.1  # of the area under the ROC curve, by which one map marks the picture's place more surely than another
EFFECT = 0.2  # of all evidence, by which covering what one map marks does more than what another one marks


@keep_old_names
@dataclass(frozen=True, eq=False)
class ControlMap:
    """A control map: a heatmap that explains nothing, and its results compared with those of the checked heatmap.

    Attributes
    ----------
    name : str
        "mirrored", "shifted", "another image", "rival", "random weights", "noise", "centre" or "edges".
    order : float or None
        How well the control map ranks the image's pixels above those of three other images: the area under the ROC
        curve, from 0 to 1; chance is 0.5. None if the image was tested alone.
    effect : float
        The share of the class's evidence that lies on the pixels that the control map marks; 1 is all of the evidence.
    alike : float
        The rank correlation of the control map with the checked heatmap, from -1 to 1.
    is_distinguished : bool
        True if the checked heatmap does better than the control map: by 0.1 in `order` or by 0.2 in `effect`.
    is_better : bool
        True if the control map does better than the checked heatmap: by 0.2 in `effect`, without a worse `order`.
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

    __repr__ = show_fields

    @property
    def words(self) -> str:
        """The control map's description, for use in a sentence."""
        return SHAMS[self.name]


def judge_sham(
    name: str, heatmap: Tensor, alike: float, own: tuple[float | None, float], other: tuple[float | None, float]
) -> ControlMap:
    """A sham beside the map that is checked: `own` and `other` are the order and the effect of the map and of the sham."""
    (order, effect), (its_order, its_effect) = own, other
    ahead = None if order is None or its_order is None else order - its_order
    is_apart = effect - its_effect >= EFFECT or (ahead is not None and ahead >= ORDER)
    is_better = its_effect - effect >= EFFECT and (ahead is None or ahead <= 0)
    return ControlMap(name, its_order, its_effect, alike, is_apart and not is_better, is_better, heatmap)


def make_shams(
    heatmaps: Tensor, images: Tensor, explain: Mapping[str, Callable[[], Tensor]], seed: int
) -> dict[str, Tensor | Exception]:
    """The shams (4,H,W) of maps of images (4,C,H,W), by name. `explain`: those that take the model, which may fail: the
    exception stands in its place."""
    size = heatmaps.shape[1:]
    found: dict[str, Tensor | Exception] = {
        "mirrored": heatmaps.flip(2),
        "shifted": heatmaps.roll([round(length / 3) for length in size], (1, 2)),
        "noise": draw_noise(heatmaps[0], seed).expand_as(heatmaps),
        "centre": make_centre(images),
        "edges": make_edges(images),
    }
    found |= {name: _try(make) for name, make in explain.items()}
    return {name: found[name] for name in SHAMS if name in found}


def _try(make: Callable[[], Tensor]) -> Tensor | Exception:
    """What it makes, or why that cannot be had: the other shams go on."""
    try:
        return make()
    except Exception as error:  # whatever the model or a user's function raises
        return error


def draw_noise(heatmap: Tensor, seed: int, *names: object) -> Tensor:
    """Noise (H,W) as smooth as a map (H,W): of the same spectrum, with phases by chance. The map is mirrored at its sides
    for that, since it does not go on at the opposite ones."""
    whole = torch.cat([heatmap, heatmap.flip(1)], 1)
    whole = torch.cat([whole, whole.flip(0)], 0)
    noise = torch.randn(
        whole.shape, generator=draw(seed, "noise of a spectrum", *names), dtype=torch.float32, device="cpu"
    )
    phases = torch.fft.rfft2(noise.to(whole))
    spectrum = torch.fft.rfft2(whole).abs() * phases / phases.abs().clamp(min=1e-12)
    found = torch.fft.irfft2(spectrum, s=whole.shape)[: heatmap.shape[0], : heatmap.shape[1]]
    return found - found.amin()
