"""What is left of a class, and of its map, in the picture times the map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradcam.errors import BlindLayerError
from gradcam.evaluation.explainers import Explain, run_explain
from gradcam.evaluation.heatmaps import check_heatmaps, to_unit
from gradcam.evaluation.subject import Subject
from gradcam.isolation import undisturbed


@dataclass(frozen=True, eq=False)
class ConfidenceChange:
    """How the class's probability changes when the picture is multiplied with its map, each float32 (N,) in [0,1].

    `drop`: share of the probability that is lost; its mean over pictures is the average drop, and less is better.
    `increase`: 1 where it grew, else 0; the mean is the increase in confidence, and more is better.
    `gain`: share of what the probability lacked that was won; the mean is the average gain, and more is better.
    """

    drop: Tensor
    increase: Tensor
    gain: Tensor

    def __repr__(self) -> str:
        means = ", ".join(f"{name} {getattr(self, name).mean().item():.3g}" for name in ("drop", "increase", "gain"))
        return f"ConfidenceChange({len(self.drop)} image(s), means: {means})"


def confidence_change(subject: Subject, heatmaps: Any) -> ConfidenceChange:
    """What the picture times its map keeps of the class's probability: a `ConfidenceChange`.

    With Y the probability of the picture, and O that of picture times map, drop is max(0, Y - O) / Y, and increase says
    whether O > Y (Chattopadhay et al., WACV 2018 (Grad-CAM++), section 4.1); gain is max(0, O - Y) / (1 - Y) (Zhang et al.,
    CVIU 2024 (Opti-CAM)). The picture is multiplied as the model takes it, after preprocessing, by the map in
    [0,1]: negative values are zero, and the rest is divided by the maximum.
    Where Y is zero nothing can be lost, and the drop is zero; where Y is one nothing can be won, and the gain is zero. A map
    that is one everywhere hides nothing: O is Y itself, without the rounding of another pass. A blank map hides all.
    `heatmaps`: one per image, as `check_heatmaps` takes them; raises `ImageError` for those that do not fit.
    """
    units = to_unit(check_heatmaps(heatmaps, subject.size, subject.images.device))
    before = subject.probabilities
    (after,) = subject.score([_multiply(subject.images, units)])
    after = torch.where(units.amin((1, 2)) == 1, before, after)
    lost, won = (before - after).clamp(min=0), (after - before).clamp(min=0)
    can_lose, can_win = before > 0, before < 1
    return ConfidenceChange(
        drop=torch.where(can_lose, lost / torch.where(can_lose, before, 1.0), 0.0),
        increase=(after > before).float(),
        gain=torch.where(can_win, won / torch.where(can_win, 1 - before, 1.0), 0.0),
    )


def coherency(subject: Subject, heatmaps: Any, explain: Explain) -> Tensor:
    """How alike a map is to that of picture times map, for the same class: float32 (N,) in [0,1]; more is better.

    Poppi et al., CVPR Workshops 2021 (ADCC): Pearson's correlation r of the two, as (1 + r) / 2. Both are taken
    in [0,1], as in `confidence_change`. `explain`: what made the maps, from the model, images (N,C,H,W) and classes (N,) to
    heatmaps (N,H,W); the model is in evaluation mode meanwhile.
    A blank or constant map varies with nothing: r is 0 where either is one, and also where the second map cannot be made
    since no gradient is left (`BlindLayerError`); images whose first map is one are not explained again.
    Raises `ImageError` for heatmaps of either kind that do not fit, and whatever else `explain` raises.
    """
    units = to_unit(check_heatmaps(heatmaps, subject.size, subject.images.device))
    correlations = torch.zeros_like(subject.probabilities)
    varied = ~_is_flat(units)
    if varied.any():
        units = units[varied]
        again = _explain_again(subject, units, varied, explain)
        correlations[varied] = _correlate(units, to_unit(check_heatmaps(again, units.shape, units.device)))
    return (1 + correlations) / 2


def _explain_again(subject: Subject, units: Tensor, chosen: Tensor, explain: Explain) -> Tensor:
    with undisturbed(subject.model), torch.enable_grad():
        try:
            return run_explain(
                explain, subject.model, _multiply(subject.images[chosen], units), subject.classes[chosen]
            )
        except BlindLayerError:
            return torch.zeros_like(units)


def _multiply(images: Tensor, units: Tensor) -> Tensor:
    return images * units[:, None].to(images.dtype)


def _is_flat(maps: Tensor) -> Tensor:
    return maps.amax((1, 2)) == maps.amin((1, 2))


def _correlate(maps: Tensor, others: Tensor) -> Tensor:
    """Pearson's correlation of each pair (N,H,W) of maps: (N,), zero where one of the two is flat."""
    a, b = (each.flatten(1) - each.mean((1, 2))[:, None] for each in (maps, others))
    found = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))  # NaN for a flat one
    return torch.where(_is_flat(maps) | _is_flat(others), 0.0, found.clamp(-1, 1))
