"""What there is to say of a layer's gradients: numbers, and whether they vanish, explode or are none at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradcam.inspection.statistics import Statistics

NO_GRADIENT, VANISHING, EXPLODING = "no gradient", "vanishing", "exploding"
NAN, INFINITE = "NaN", "infinite"

# Of the output's gradient at a layer over that at the model's output, by their norms, which pooling and the number of
# values change little. Networks that train well stay far inside of these (ResNets, VGGs, DenseNet121, Vision Transformers,
# fresh or trained); thirty sigmoid layers, or thirty with weights four times too large, lie far outside.
LEAST, MOST = 1e-4, 1e4


@dataclass(frozen=True)
class ParameterGradient:
    """The gradient at one of a layer's own parameters.

    `name`: in its layer, such as "weight". `norm`: the parameter's own. `gradient`: None where the score does not depend
    on it. `ratio`: the gradient's norm over the parameter's own, None without a gradient, and of a parameter of zeros.
    """

    name: str
    norm: float
    gradient: Statistics | None

    @property
    def ratio(self) -> float | None:
        return None if self.gradient is None or self.norm == 0 else self.gradient.norm / self.norm


@dataclass(frozen=True)
class LayerGradients:
    """The gradients at one layer.

    `name`: dotted, "" for the model itself. `type`: its class. `runs`: how often it ran, 0 where only its parameters were
    used. `activations`: of the gradient at its output, the first floating tensor of several, over all runs together; None
    where there is none. `parameters`: its own, without those of its parts. `verdict`: None, or what is conspicuous.
    """

    name: str
    type: str
    runs: int
    activations: Statistics | None
    parameters: tuple[ParameterGradient, ...]
    verdict: str | None = None

    def rows(self) -> list[dict[str, Any]]:
        """A flat dict for the output and for each parameter: which it is, its statistics, its ratio, the verdict."""
        found: list[tuple[str, Statistics | None, float | None]] = []
        if self.runs:
            found.append(("output", self.activations, None))
        found += [(it.name, it.gradient, it.ratio) for it in self.parameters]
        start = {"layer": self.name, "type": self.type, "runs": self.runs}
        return [
            {**start, "tensor": name, **_fields(gradient), "ratio": ratio, "verdict": self.verdict}
            for name, gradient, ratio in found
        ]


def judge(layers: Sequence[LayerGradients], reference: float) -> tuple[LayerGradients, ...]:
    """The layers, each with its verdict. `reference`: the norm of the gradient at the model's output.

    "NaN", "infinite": somewhere in the gradient at its output or at a parameter. "no gradient": there is none, or it is
    exactly zero everywhere, at its output or at all of its parameters. "vanishing", "exploding": the norm of the gradient
    at its output is below 1e-4 or above 1e4 times that at the model's output. None: nothing of this.
    """
    return tuple(replace(layer, verdict=_find_verdict(layer, reference)) for layer in layers)


def _find_verdict(layer: LayerGradients, reference: float) -> str | None:
    parameters = [it.gradient for it in layer.parameters]
    found = [it for it in (layer.activations, *parameters) if it is not None]
    if any(it.nans for it in found):
        return NAN
    if any(it.infinities for it in found):
        return INFINITE
    outputs = [layer.activations] if layer.runs else []
    if any(group and all(map(_is_nothing, group)) for group in (outputs, parameters)):
        return NO_GRADIENT
    if layer.activations is None or not 0 < reference < math.inf:
        return None
    share = layer.activations.norm / reference
    return VANISHING if share < LEAST else EXPLODING if share > MOST else None


def _is_nothing(gradient: Statistics | None) -> bool:
    return gradient is None or gradient.zeros == 1


def _fields(gradient: Statistics | None) -> dict[str, Any]:
    names = Statistics.__dataclass_fields__
    return dict.fromkeys([*names, "rms"]) if gradient is None else {**asdict(gradient), "rms": rms(gradient)}


def rms(gradient: Statistics) -> float:
    """The root of the mean square: the size of a usual value, whatever their number."""
    return gradient.norm / math.sqrt(gradient.count)


def join(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of all of these values together."""
    if len(parts) == 1:
        return parts[0]
    count = sum(it.count for it in parts)
    mean = sum(it.mean * it.count for it in parts) / count
    around = sum(it.std**2 * (it.count - 1) + (it.mean - mean) ** 2 * it.count for it in parts)
    return Statistics(
        count=count,
        norm=math.hypot(*(it.norm for it in parts)),
        mean=mean,
        std=math.sqrt(around / (count - 1)),
        zeros=sum(it.zeros * it.count for it in parts) / count,
        largest=max(it.largest for it in parts),
        nans=sum(it.nans for it in parts),
        infinities=sum(it.infinities for it in parts),
    )
