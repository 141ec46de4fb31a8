"""How a score's gradient flows back through a network: at what its layers give, and at their parameters."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcam.cam.forward import caller_autocast, has_float16
from gradcam.cam.grid import at_least_float32
from gradcam.errors import LayerError, ModelError, join_names
from gradcam.hooks import pytorch
from gradcam.hooks.autograd import HALF_PRECISION_SCALES, IN_A_MODEL, known_failures
from gradcam.hooks.hooks import Hooks, refuse_vmap
from gradcam.hooks.nested import caller_keeps, first_floating, replace_tensor, to_batch
from gradcam.hooks.preserve import preserve_state
from gradcam.inspection.edit import Aliases
from gradcam.inspection.selection import Layers, select_layers
from gradcam.layers.find import returns_input, unwrap
from gradcam.targets.classes import compute_scores

NO_GRADIENT, VANISHING, EXPLODING = "no gradient", "vanishing", "exploding"
NAN, INFINITE = "NaN", "infinite"
# Of the output's gradient at a layer over that at the model's output, by their norms, which pooling and the number of
# values change little. Networks that train well stay far inside of these (ResNets, VGGs, DenseNet121, Vision Transformers,
# fresh or trained); thirty sigmoid layers, or thirty with weights four times too large, lie far outside.
LEAST, MOST = 1e-4, 1e4
CHUNK = 2**16  # values, of each of the processor's threads: as float64 half a megabyte, which a core keeps at hand
MOST_THREADS = 4  # that a chunk is for; the part that NumPy does has one
SMALLEST, GREATEST = 1e-290, 1e290  # sums of squares in which float64 is as precise as it should be
NEAR = 1e-6  # a deviation of less than this part of the squares is measured from the mean, before rounding hides it
Measured = tuple[int, Tensor]  # how many values, and the numbers of `measure`


@dataclass(frozen=True, eq=False)
class GradientFlow:
    """The gradients of a score at each layer of a model, in order of execution.

    Attributes
    ----------
    layers : tuple of LayerGradients
        In the order in which the layers finish.
    reference : float
        The norm of the gradient at the model's output. Verdicts compare the layers' gradients with it.
    model : str
        The model's class.
    classes : Tensor (N,K) or None
        int64; None if the target was a function.
    scores : Tensor (N,K)
        The scores, float32. The gradients are those of their sum.

    Examples
    --------
    >>> import torch, torchvision
    >>> from gradcam import inspection
    >>> flow = inspection.gradients(torchvision.models.resnet18(weights=None), torch.rand(1, 3, 64, 64), target=281)
    >>> sorted(flow.rows()[0])[:3]
    ['count', 'infinities', 'largest']
    """

    layers: tuple[LayerGradients, ...]
    reference: float
    model: str
    classes: Tensor | None
    scores: Tensor

    def __repr__(self) -> str:
        verdicts = Counter(layer.verdict for layer in self.layers if layer.verdict is not None)
        told = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "nothing conspicuous"
        size = f"{len(self.layers)} layer(s), {len(self.scores)} image(s)"
        return f"{type(self).__name__}({self.model}, {size}, {told})"

    def rows(self) -> list[dict[str, Any]]:
        """List one flat dict per layer output and parameter, for `pandas.DataFrame`."""
        return [row for layer in self.layers for row in layer.rows()]


@dataclass(frozen=True)
class LayerGradients:
    """The gradients at one layer.

    Attributes
    ----------
    name : str
        Its dotted name, "" for the model itself.
    type : str
        The layer's class.
    runs : int
        How often it ran; 0 if only its parameters were used.
    activations : Statistics or None
        Statistics of the gradient at the layer's output, over all runs together. If the layer returns several tensors,
        the first floating-point one is used.
    parameters : tuple of ParameterGradient
        The layer's own parameters, without those of its submodules.
    verdict : str or None
        A problem such as "vanishing"; None if there is none.

    Examples
    --------
    >>> import torch, torchvision
    >>> from gradcam import inspection
    >>> flow = inspection.gradients(torchvision.models.resnet18(weights=None), torch.rand(1, 3, 64, 64), layers="fc")
    >>> (layer,) = flow.layers
    >>> layer.name, [parameter.name for parameter in layer.parameters], layer.parameters_norm > 0, len(layer.rows())
    ('fc', ['weight', 'bias'], True, 3)
    """

    name: str
    type: str
    runs: int
    activations: Statistics | None
    parameters: tuple[ParameterGradient, ...]
    verdict: str | None = None

    @property
    def parameters_norm(self) -> float:
        """The norm of the gradients of all its parameters together; NaN if it has none."""
        norms = [it.gradient.norm for it in self.parameters if it.gradient is not None]
        return math.hypot(*norms) if norms else math.nan

    def rows(self) -> list[dict[str, Any]]:
        """List one flat dict for the output and one per parameter, each with name, statistics, ratio and verdict."""
        found: list[tuple[str, Statistics | None, float | None]]
        found = [("output", self.activations, None)] if self.runs else []
        found += [(it.name, it.gradient, it.ratio) for it in self.parameters]
        start = {"layer": self.name, "type": self.type, "runs": self.runs}
        none = dict.fromkeys([*Statistics.__dataclass_fields__, "rms"])
        return [
            {
                **start,
                "tensor": name,
                **(none if gradient is None else {**asdict(gradient), "rms": rms(gradient)}),
                "ratio": ratio,
                "verdict": self.verdict,
            }
            for name, gradient, ratio in found
        ]


@dataclass(frozen=True)
class ParameterGradient:
    """The gradient of one of a layer's own parameters.

    Attributes
    ----------
    name : str
        Its name in the layer, such as "weight".
    norm : float
        The norm of the parameter itself.
    gradient : Statistics or None
        Statistics of the gradient; None if the score does not depend on the parameter.

    Examples
    --------
    >>> import torch, torchvision
    >>> from gradcam import inspection
    >>> flow = inspection.gradients(torchvision.models.resnet18(weights=None), torch.rand(1, 3, 64, 64), layers="fc")
    >>> weight: inspection.ParameterGradient = flow.layers[0].parameters[0]
    >>> weight.ratio == weight.gradient.norm / weight.norm
    True
    """

    name: str
    norm: float
    gradient: Statistics | None

    @property
    def ratio(self) -> float | None:
        """The gradient's norm divided by the parameter's norm; None without a gradient, or if the parameter is all zeros."""
        return None if self.gradient is None or self.norm == 0 else self.gradient.norm / self.norm


@dataclass(frozen=True)
class Statistics:
    """Summary statistics of a tensor.

    For an empty tensor, `norm` and `largest` are 0, and `mean`, `std` and `zeros` are NaN. With NaN or infinite values,
    the other numbers follow floating-point arithmetic.

    Attributes
    ----------
    count : int
        The number of values.
    norm : float
        The Euclidean norm.
    mean : float
        The mean.
    std : float
        The sample standard deviation, with divisor count - 1; 0 for one value.
    zeros : float
        The fraction of values that are exactly zero, in [0,1].
    largest : float
        The largest absolute value.
    nans : int
        The number of NaN values.
    infinities : int
        The number of infinite values.

    Examples
    --------
    >>> import torch, torchvision
    >>> from gradcam import inspection
    >>> flow = inspection.gradients(torchvision.models.resnet18(weights=None), torch.rand(1, 3, 64, 64), layers="layer4")
    >>> statistics: inspection.Statistics = flow.layers[0].activations
    >>> statistics.count, statistics.is_finite
    (2048, True)
    """

    count: int
    norm: float
    mean: float
    std: float
    zeros: float
    largest: float
    nans: int
    infinities: int

    @property
    def is_finite(self) -> bool:
        """True if no value is NaN or infinite."""
        return not self.nans and not self.infinities


def gradients(model: nn.Module, images: Any, *, target: Any = None, layers: Layers | None = None) -> GradientFlow:
    """Measure the gradients of a score at each layer's output and parameters.

    The gradient is that of the sum of all scores (N,K). For one image and one class, this is the gradient of the
    class's logit. Frozen parameters have gradients, too, except in TorchScript or in a custom `autograd.Function`. In
    float16, gradients are scaled during the backward pass, so that small ones are not lost. The model runs in
    evaluation mode, eagerly, and is left unchanged, ``.grad`` included. Several threads may call this at once.

    Parameters
    ----------
    model : nn.Module
        Any model.
    images : Tensor (N,C,H,W) or (N,C,D,H,W), tuple or dict
        As in `gradcam.explain`.
    target : Any, default None
        As in `gradcam.explain`.
    layers : str, nn.Module, or a sequence of them, default None
        Names, patterns (`layer*.conv1`) and modules. None selects all layers that ran and either have no submodules or
        have their own parameters. Layers that return their input unchanged are left out.

    Returns
    -------
    GradientFlow
        One entry per layer, over all of its runs together, with a verdict on problems.

    Raises
    ------
    LayerError
        If a layer does not exist, never runs, or returns no floating-point tensor. Also if a pattern matches no layer
        that runs and returns such a tensor.
    ModelError
        If no recorded operation leads to the score.
    GradcamError
        As in `gradcam.explain`.

    Examples
    --------
    >>> import torch, torchvision
    >>> from gradcam import inspection
    >>> model = torchvision.models.resnet18(weights=None)
    >>> flow = inspection.gradients(model, torch.rand(1, 3, 64, 64), target=281)
    >>> len(flow.layers), flow.layers[0].name
    (52, 'conv1')
    """
    model, batch, leaves = unwrap(model), to_batch(images), list[Tensor]()

    def to_leaf(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            leaves.append(tensor := caller_keeps(tensor).detach().requires_grad_())
        return tensor.clone()  # which the model may change in place

    own = {name: it for name, it in model.named_modules() if not it._modules or [*it.parameters(recurse=False)]}
    seen = Observation(own if layers is None else select_layers(model, layers))
    with preserve_state(model) as modules, torch.enable_grad(), known_failures(IN_A_MODEL), Hooks() as hooks:
        given = batch.copy(to_leaf)
        seen.follow(hooks)
        with Aliases(model.parameters(), seen.note_use) as aliases:
            output = seen.pass_on(None, given.run(model), hooks)
            scored = compute_scores(target, output, batch.images)
        if not scored.values.requires_grad:
            raise ModelError(
                "The score does not depend on the images or on any parameter: no recorded operation leads from these to the "
                "score. Possible causes: torch.no_grad in a forward method, a detached value, or an operation without a "
                "derivative (argmax, rounding, 8-bit layers). Remove the cause, or choose another score."
            )
        device = scored.values.device.type
        is_scaled = caller_autocast(device) == torch.float16 or has_float16((given.args, given.kwargs, output), modules)
        with pytorch.without_autocast(device):
            seen.differentiate(scored.values.sum(), aliases, leaves, is_scaled=is_scaled)
        found, reference = [seen.describe(name) for name in _names(model, layers, seen)], seen.reference()
    return GradientFlow(
        layers=tuple(replace(layer, verdict=judge(layer, reference)) for layer in found),
        reference=reference,
        model=type(model).__name__,
        classes=None if scored.classes is None else scored.classes.to(batch.device),
        scores=scored.values.detach().float().to(batch.device),
    )


def _names(model: nn.Module, layers: Layers | None, seen: Observation) -> list[str]:
    """The layers to tell of, in order of execution. Raises `LayerError` for one that was asked for and has no gradients."""
    if layers is None:
        return [name for name in seen.order if name in seen.owners.values() or name not in seen.idle | seen.silent]
    for each in [layers] if isinstance(layers, (str, nn.Module)) else layers:
        chosen = list(select_layers(model, each))
        if not seen.order.keys() & chosen:
            raise LayerError(
                f"Layer {join_names(chosen[:3])} did not run: choose a layer on the path from the input to the score. "
                "(Hooks are skipped in modules whose forward() is called directly.)"
            )
        if seen.silent.issuperset(seen.order.keys() & chosen):
            raise LayerError(
                f"Layer {join_names(chosen[:3])} returned no floating-point tensor: choose a layer whose output is one."
            )
    return [name for name in seen.order if name not in seen.silent]


class Observation:
    """What is seen of these layers while a model runs, and while a score is differentiated. `order`: of those that ran,
    or whose parameters were used. `silent`: those that gave no floating tensor. `idle`: those that gave back their
    input. `owners`: of parameters, by id."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.order: dict[str, None] = {}
        self.silent: set[str] = set()
        self.idle: set[str] = set()
        self.owners = {id(it): name for name, layer in layers.items() for it in layer.parameters(recurse=False)}
        self._layers = layers
        self._runs: Counter[str] = Counter()
        self._scale = 1.0
        self._is_differentiating = False
        # By layer; None for the model's output.
        self._activations: dict[str | None, list[Measured]] = defaultdict(list)
        self._parameters: dict[nn.Parameter, Measured] = {}

    def note_use(self, parameter: nn.Parameter) -> None:
        """A parameter came to an operation: those of attention are used by it, and their own layer never runs."""
        if (name := self.owners.get(id(parameter))) is not None:
            self.order.setdefault(name)

    def follow(self, hooks: Hooks) -> None:

        def look(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if self._is_differentiating:  # a checkpoint repeats what has been seen
                return None
            if name not in self._runs:  # it counts from here, not from the first use of a parameter
                self.order.pop(name, None)
                self.order[name] = None
            self._runs[name] += 1
            tensor = first_floating(output)
            if tensor is None:
                self.silent.add(name)
                return None
            refuse_vmap(tensor)
            if returns_input(module, args, tensor):
                self.idle.add(name)
            return self.pass_on(name, output, hooks)

        for name, layer in self._layers.items():
            if not isinstance(layer, torch.jit.ScriptModule):  # which takes no hook, and only a model's parts can be
                hooks.after_forward(layer, partial(look, name))

    def pass_on(self, name: str | None, output: Any, hooks: Hooks) -> Any:
        """A layer's output, or the model's under None; the gradient at its first floating tensor is measured as it comes."""
        tensor = first_floating(output)

        def keep(gradient: Tensor) -> None:
            if gradient.numel():
                self._activations[name].append(self._measure(gradient))

        if tensor is None or not tensor.requires_grad:
            return output
        return replace_tensor(output, tensor, hooks.observe_gradient(tensor, keep))

    def _measure(self, gradient: Tensor) -> Measured:
        return gradient.numel(), measure(at_least_float32(gradient) / self._scale)

    def differentiate(self, score: Tensor, aliases: Aliases, leaves: Sequence[Tensor], *, is_scaled: bool) -> None:
        """Of a score, one value; with float16 in its graph at the first scale at which all are finite, or else as it is."""
        self._is_differentiating = True
        for scale in (*HALF_PRECISION_SCALES, 1.0) if is_scaled else (1.0,):
            self._scale = scale
            self._activations.clear()
            gradients = aliases.differentiate(score * scale, leaves)
            self._parameters = {parameter: self._measure(it) for parameter, it in gradients.items() if it.numel()}
            found = chain(*self._activations.values(), self._parameters.values())
            if is_scaled and all(to_statistics(*measured).is_finite for measured in found):
                break

    def reference(self) -> float:
        """The norm of the gradient at the model's output; where that has none, at the last layer that has one."""
        joined = (self._joined(name) for name in (None, *reversed(self.order)))
        return next((found.norm for found in joined if found is not None and 0 < found.norm < math.inf), 0.0)

    def _joined(self, name: str | None) -> Statistics | None:
        found = [to_statistics(*measured) for measured in self._activations.get(name, ())]
        return join(found) if found else None

    def describe(self, name: str) -> LayerGradients:
        layer, parameters = self._layers[name], []
        for key, it in layer.named_parameters(recurse=False):
            found = self._parameters.get(it)
            exact = None if it.is_complex() else torch.float32 if it.device.type == "mps" else torch.float64
            norm = torch.linalg.vector_norm(it.detach(), dtype=exact).item()
            parameters.append(ParameterGradient(key, norm, None if found is None else to_statistics(*found)))
        return LayerGradients(name, type(layer).__name__, self._runs[name], self._joined(name), tuple(parameters))


def judge(layer: LayerGradients, reference: float) -> str | None:
    """The verdict on a layer. `reference`: the norm of the gradient at the model's output. "NaN", "infinite": somewhere
    in the gradient at its output or at a parameter. "no gradient": there is none, or it is exactly zero everywhere, at
    its output or at all of its parameters. "vanishing", "exploding": the norm of the gradient at its output is below
    1e-4 or above 1e4 times that at the model's output. None: nothing of this."""
    parameters = [it.gradient for it in layer.parameters]
    found = [it for it in (layer.activations, *parameters) if it is not None]
    if any(it.nans for it in found):
        return NAN
    if any(it.infinities for it in found):
        return INFINITE
    for group in ([layer.activations] if layer.runs else [], parameters):
        if group and all(it is None or it.zeros == 1 for it in group):
            return NO_GRADIENT
    if layer.activations is None or not 0 < reference < math.inf:
        return None
    share = layer.activations.norm / reference
    return VANISHING if share < LEAST else EXPLODING if share > MOST else None


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


def to_statistics(count: int, numbers: Tensor) -> Statistics:
    """`numbers` are those that `measure` gives of a tensor of so many values."""
    norm, mean, std, zeros, largest, nans, infinities = numbers.tolist()
    return Statistics(count, norm, mean, std, zeros, largest, int(nans), int(infinities))


@torch.no_grad()
def measure(tensor: Tensor) -> Tensor:
    """The numbers of `Statistics` behind the count, as float64 (7,) on the tensor's device: nothing waits for a GPU.
    Right to 1e-6 in relation to what is measured, whatever the dtype, the layout and the scale (float32 on MPS, which
    has no float64). The real and the imaginary parts of complex numbers are values of their own."""
    tensor = tensor.detach()
    if tensor.is_nested:
        tensor = torch.cat([each.reshape(-1) for each in tensor.unbind()])
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    # All values as (n,), in the order in which they lie in memory, so that none need be moved.
    strides = tensor.stride()
    values = tensor.permute(sorted(range(tensor.ndim), key=lambda axis: -strides[axis])).reshape(-1)
    exact = torch.float32 if values.device.type == "mps" else torch.float64
    if not values.numel():
        return values.new_tensor([0, math.nan, math.nan, math.nan, 0, 0, 0], dtype=exact)
    if values.device.type != "cpu":
        return measure_at_once(values, exact)
    return torch.tensor(_measure_in_chunks(values), dtype=exact, device="cpu")


def measure_at_once(values: Tensor, exact: torch.dtype = torch.float64) -> Tensor:
    """The numbers of (n,) values by a few operations on all of them: for devices that run ahead of Python."""
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float() if values.is_floating_point() else values.to(exact)
    count = values.numel()
    mean = values.mean(dtype=exact)
    centre = mean.to(values.dtype)
    # A difference from the rounded mean is as precise as the values are, and what the rounding shifts is known.
    squares = torch.linalg.vector_norm(values - centre, dtype=exact) ** 2 - count * (mean - centre) ** 2
    low, high = values.aminmax()
    numbers = [
        torch.linalg.vector_norm(values, dtype=exact), mean, (squares.clamp(min=0) / max(1, count - 1)).sqrt(),
        (values == 0).sum().to(exact) / count, torch.maximum(-low, high), values.isnan().sum(), values.isinf().sum(),
    ]  # fmt: skip
    return torch.stack([number.to(exact) for number in numbers])


def _measure_in_chunks(values: Tensor) -> list[float]:
    """The same on the processor, by chunks, so that each value is fetched from memory once."""
    count = len(values)
    total, squares, largest, zeros, nans, infinities = _sum_up(values)
    if nans or infinities:
        greatest = math.nan if nans else math.inf
        return [greatest, total / count, math.nan, zeros / count, greatest, nans, infinities]
    if largest and not SMALLEST < squares < GREATEST:  # float64 alone can hold such values
        norm, mean, std, share, *_ = _measure_in_chunks(values / largest)
        return [norm * largest, mean * largest, std * largest, share, largest, 0, 0]
    spread = squares - total / count * total
    if spread <= NEAR * squares:
        total_away, squares_away, *_ = _sum_up(values.double() - total / count)
        spread = max(0.0, squares_away - total_away / count * total_away)
    std = math.sqrt(spread / max(1, count - 1))
    return [math.sqrt(squares), total / count, std, zeros / count, largest, 0, 0]


def _sum_up(values: Tensor) -> tuple[float, float, float, int, int, int]:
    """Sum, sum of squares, greatest absolute value, and how many zeros, NaN and infinities, by chunks as float64."""
    size = CHUNK * min(MOST_THREADS, torch.get_num_threads())
    buffer = torch.empty(min(size, len(values)), dtype=torch.float64, device="cpu")
    total = squares = largest = 0.0
    zeros = nans = infinities = 0
    for chunk in values.split(size):
        part = buffer[: len(chunk)].copy_(chunk)
        low, high = (number.item() for number in part.aminmax())
        total += part.sum().item()
        squares += torch.dot(part, part).item()
        largest = max(largest, -low, high)
        zeros += int(np.count_nonzero(part.numpy() == 0))  # faster than PyTorch's own, which branches
        if not (math.isfinite(low) and math.isfinite(high)):
            nans += int(np.count_nonzero(np.isnan(part.numpy())))
            infinities += int(np.count_nonzero(np.isinf(part.numpy())))
    return total, squares, largest, zeros, nans, infinities
