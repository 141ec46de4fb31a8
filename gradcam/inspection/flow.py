"""Measure the gradient of a score throughout a network: at the outputs of layers, and at their parameters."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcam.cam.forward import caller_autocast, has_float16
from gradcam.errors import LayerError, ModelError, join_names
from gradcam.hooks import pytorch
from gradcam.hooks.autograd import HALF_PRECISION_SCALES, TranslatedErrors
from gradcam.hooks.containers import at_least_float32, detach_input, find_floating_tensor, replace_tensor, to_batch
from gradcam.hooks.hooks import Hooks, refuse_vmap
from gradcam.hooks.model_advice import ADVICE_IN_MODEL
from gradcam.hooks.preserve import preserve_state
from gradcam.inspection.edit import ParameterAliases
from gradcam.inspection.selection import Layers, select_layers, to_layer_list
from gradcam.layers.find import unwrap
from gradcam.layers.grids import returns_input
from gradcam.targets.classes import compute_scores

NO_GRADIENT, VANISHING, EXPLODING = "no gradient", "vanishing", "exploding"
NAN, INFINITE = "NaN", "infinite"
# Limits for a ratio: the norm of the gradient at a layer's output, divided by the norm at the model's output. The ratio
# hardly depends on pooling or on the number of values. For ResNets, VGGs, DenseNet121 and Vision Transformers, trained
# or not, the ratio is far inside the limits. For networks with thirty sigmoid layers, or with weights four times too
# large, the ratio is far outside.
MIN_NORM_RATIO, MAX_NORM_RATIO = 1e-4, 1e4
# The number of values per CPU thread. In float64, these values take half a megabyte, which fits into a core's cache.
CHUNK_VALUES = 2**16
MAX_CHUNK_THREADS = 4  # More threads do not get larger chunks, because NumPy's part of the work uses a single thread.
MIN_SQUARE_SUM, MAX_SQUARE_SUM = 1e-290, 1e290  # Inside these limits, a sum of squares is precise in float64.
# The sum of squared deviations is first computed from the sum of squares. If the result is below this fraction of the
# sum of squares, its rounding error is too large. The sum is then computed from the values minus the mean.
MIN_RELATIVE_SPREAD = 1e-6
Measurement = tuple[int, Tensor]  # (number of values, result of `measure`)


@dataclass(frozen=True, eq=False)
class GradientFlow:
    """The gradients of a score at each layer of a model, in order of execution.

    Attributes
    ----------
    layers : tuple of LayerGradients
        The layers, in the order in which they finish.
    reference : float
        The norm of the gradient at the model's output. Verdicts compare the layers' gradients with this norm.
    model : str
        The model's class.
    classes : Tensor (N,K) or None
        The explained classes, int64; None if the target was a function.
    scores : Tensor (N,K)
        The scores, float32. The sum of all scores was differentiated.

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
        summary = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "nothing conspicuous"
        size = f"{len(self.layers)} layer(s), {len(self.scores)} image(s)"
        return f"{type(self).__name__}({self.model}, {size}, {summary})"

    def rows(self) -> list[dict[str, Any]]:
        """Return a flat dict for each layer's output and for each parameter, as rows of a `pandas.DataFrame`."""
        return [row for layer in self.layers for row in layer.rows()]


@dataclass(frozen=True)
class LayerGradients:
    """The gradients at one layer.

    Attributes
    ----------
    name : str
        The layer's dotted name, "" for the model itself.
    type : str
        The layer's class.
    runs : int
        How often the layer ran; 0 if only its parameters were used.
    activations : Statistics or None
        Statistics of the gradient at the layer's output, over all runs together. If the layer returns several tensors,
        its output is the first floating-point tensor.
    parameters : tuple of ParameterGradient
        The layer's own parameters, without those of its submodules.
    verdict : str or None
        A problem such as "vanishing"; None if there is no problem.

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
        """Return the norm of the gradient with respect to all the layer's parameters; NaN if there is no gradient."""
        norms = [parameter.gradient.norm for parameter in self.parameters if parameter.gradient is not None]
        return math.hypot(*norms) if norms else math.nan

    def rows(self) -> list[dict[str, Any]]:
        """Return flat dicts with names, statistics, ratio and verdict: one for the output, one for each parameter."""
        gradients: list[tuple[str, Statistics | None, float | None]]
        gradients = [("output", self.activations, None)] if self.runs else []
        gradients += [(parameter.name, parameter.gradient, parameter.ratio) for parameter in self.parameters]
        missing = dict.fromkeys([*Statistics.__dataclass_fields__, "rms"])
        return [
            {"layer": self.name, "type": self.type, "runs": self.runs, "tensor": name}
            | (missing if gradient is None else asdict(gradient) | {"rms": rms(gradient)})
            | {"ratio": ratio, "verdict": self.verdict}
            for name, gradient, ratio in gradients
        ]


@dataclass(frozen=True)
class ParameterGradient:
    """The gradient of one parameter of a layer.

    Attributes
    ----------
    name : str
        The parameter's name in the layer, such as "weight".
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
        """Return the gradient's norm divided by the parameter's norm.

        The result is None if there is no gradient, or if the parameter's norm is 0.
        """
        return None if self.gradient is None or self.norm == 0 else self.gradient.norm / self.norm


@dataclass(frozen=True)
class Statistics:
    """Summary statistics of a tensor.

    For an empty tensor, `norm` and `largest` are 0, and `mean`, `std` and `zeros` are NaN. NaN and infinite values of
    the tensor are included in `norm`, `mean`, `std` and `largest`.

    Attributes
    ----------
    count : int
        The number of values.
    norm : float
        The Euclidean norm.
    mean : float
        The mean.
    std : float
        The sample standard deviation (the divisor is ``count - 1``); 0 if there is only one value.
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
        """Return True if no value is NaN or infinite."""
        return not self.nans and not self.infinities


def gradients(model: nn.Module, images: Any, *, target: Any = None, layers: Layers | None = None) -> GradientFlow:
    """Measure the gradients of a score at each layer's output and parameters.

    The sum of all scores (N,K) is differentiated. For one image and one class, this sum is the class's logit. Frozen
    parameters also get gradients, except in TorchScript or in a custom `autograd.Function`. In float16, gradients are
    scaled during the backward pass, so that small values are not lost. The model runs eagerly in evaluation mode. The
    model and its ``.grad`` are left unchanged. Several threads may call this function at once.

    Parameters
    ----------
    model : nn.Module
        Any model.
    images : Tensor (N,C,H,W) or (N,C,D,H,W), tuple or dict
        As in `gradcam.explain`.
    target : Any, default None
        As in `gradcam.explain`.
    layers : str, nn.Module, or a sequence of them, default None
        Names, patterns (`layer*.conv1`) and modules. None selects the layers that ran and have no submodules, and the
        layers that have their own parameters. Layers without parameters that return their input unchanged are left out.

    Returns
    -------
    GradientFlow
        The gradients of each layer, with statistics over all runs of the layer, and a verdict.

    Raises
    ------
    LayerError
        If a layer does not exist, never runs, or returns no floating-point tensor. Also if a pattern matches no layer
        that runs and returns such a tensor.
    ModelError
        If autograd records no path from the images or parameters to the score.
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
            leaves.append(tensor := detach_input(tensor).detach().requires_grad_())
        return tensor.clone()  # Autograd forbids in-place changes of a leaf, and the model may change its input.

    leaf_layers = {
        name: layer for name, layer in model.named_modules() if not layer._modules or [*layer.parameters(recurse=False)]
    }
    observer = GradientObserver(leaf_layers if layers is None else select_layers(model, layers))
    translated = TranslatedErrors(ADVICE_IN_MODEL)
    with preserve_state(model) as modules, torch.enable_grad(), translated, Hooks() as hooks:
        copy = batch.copy(to_leaf)
        observer.attach(hooks)
        with ParameterAliases(model.parameters(), observer.note_use) as aliases:
            output = observer.watch_output(None, copy.run(model), hooks)
            scores = compute_scores(target, output, batch.images)
        if not scores.values.requires_grad:
            raise ModelError(
                "The score does not depend on the images or on any parameter: no recorded operation leads to the score. "
                "Possible causes: torch.no_grad in a forward method, a detached value, or an operation without a "
                "derivative (argmax, rounding, 8-bit layers). Remove the cause, or choose another score."
            )
        device = scores.values.device.type
        is_scaled = caller_autocast(device) == torch.float16 or has_float16((copy.args, copy.kwargs, output), modules)
        with pytorch.without_autocast(device):
            observer.differentiate(scores.values.sum(), aliases, leaves, is_scaled=is_scaled)
        reference = observer.reference()
        names = _select_layer_names(model, layers, observer)
        layer_gradients = tuple(observer.describe(name, reference) for name in names)
    classes = None if scores.classes is None else scores.classes.to(batch.device)
    values = scores.values.detach().float().to(batch.device)
    return GradientFlow(layer_gradients, reference, type(model).__name__, classes, values)


def _select_layer_names(model: nn.Module, layers: Layers | None, observer: GradientObserver) -> list[str]:
    """Return the layers to report, in order of execution.

    Raises `LayerError` if a requested layer did not run, or returned no floating-point tensor.
    """
    if layers is None:
        owners, skipped = observer.parameter_owners.values(), observer.returning_input | observer.without_tensor
        return [name for name in observer.order if name in owners or name not in skipped]
    for requested in to_layer_list(layers):
        names = list(select_layers(model, requested))
        if not observer.order.keys() & names:
            raise LayerError(
                f"Layer {join_names(names[:3])} did not run: choose a layer on the path from the input to the score. "
                "(Hooks are skipped in modules whose forward() is called directly.)"
            )
        if observer.without_tensor.issuperset(observer.order.keys() & names):
            raise LayerError(f"Layer {join_names(names[:3])} returned no floating-point tensor: choose another layer.")
    return [name for name in observer.order if name not in observer.without_tensor]


class GradientObserver:
    """Observes layers while a model runs and while a score is differentiated.

    `order` contains the names of layers that ran, or whose parameters were used, in order of execution.
    `without_tensor` contains the layers that returned no floating-point tensor. `returning_input` contains the layers
    that returned their input. `parameter_owners` maps the id of each parameter to the name of its layer.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.order: dict[str, None] = {}
        self.without_tensor: set[str] = set()
        self.returning_input: set[str] = set()
        self.parameter_owners = {
            id(parameter): name for name, layer in layers.items() for parameter in layer.parameters(recurse=False)
        }
        self._layers = layers
        self._runs: Counter[str] = Counter()
        self._scale = 1.0
        self._is_differentiating = False
        # The keys are layer names, and None for the model's output.
        self._activations: dict[str | None, list[Measurement]] = defaultdict(list)
        self._parameters: dict[nn.Parameter, Measurement] = {}

    def note_use(self, parameter: nn.Parameter) -> None:
        """Record that an operation uses a parameter.

        The layer that owns the parameter may never run. For example, attention uses the weight of its output projection
        without a call of the projection layer.
        """
        if (name := self.parameter_owners.get(id(parameter))) is not None:
            self.order.setdefault(name)

    def attach(self, hooks: Hooks) -> None:

        def observe_output(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            if self._is_differentiating:  # A checkpoint repeats a run in the backward pass.
                return None
            # A use of a parameter may have listed the layer already. Move the layer to the position of its first run.
            if name not in self._runs:
                self.order.pop(name, None)
                self.order[name] = None
            self._runs[name] += 1
            if (tensor := find_floating_tensor(output)) is None:
                self.without_tensor.add(name)
                return None
            refuse_vmap(tensor)
            if returns_input(module, args, tensor):
                self.returning_input.add(name)
            return self.watch_output(name, output, hooks)

        for name, layer in self._layers.items():
            # A model may contain scripted modules, which do not support these hooks.
            if not isinstance(layer, torch.jit.ScriptModule):
                hooks.after_forward(layer, partial(observe_output, name))

    def watch_output(self, name: str | None, output: Any, hooks: Hooks) -> Any:
        """Register the measurement of the gradient at `output`, and return the output to continue with.

        `name` is the name of the layer; None for the output of the model.
        """
        tensor = find_floating_tensor(output)

        def store(gradient: Tensor) -> None:
            if gradient.numel():
                self._activations[name].append(self._measure(gradient))

        if tensor is None or not tensor.requires_grad:
            return output
        return replace_tensor(output, tensor, hooks.observe_gradient(tensor, store))

    def _measure(self, gradient: Tensor) -> Measurement:
        return gradient.numel(), measure(at_least_float32(gradient) / self._scale)

    def differentiate(self, score: Tensor, aliases: ParameterAliases, leaves: list[Tensor], *, is_scaled: bool) -> None:
        """Run the backward pass of a scalar score, and measure the gradients.

        If `is_scaled` is True (for graphs with float16), the score is multiplied by the largest scale for which all
        gradients are finite. The measured gradients are divided by this scale.
        """
        self._is_differentiating = True
        for scale in (*HALF_PRECISION_SCALES, 1.0) if is_scaled else (1.0,):
            self._scale = scale
            self._activations.clear()
            gradients = aliases.differentiate(score * scale, leaves)
            self._parameters = {key: self._measure(gradient) for key, gradient in gradients.items() if gradient.numel()}
            measurements = chain(*self._activations.values(), self._parameters.values())
            if is_scaled and all(to_statistics(*measurement).is_finite for measurement in measurements):
                break

    def reference(self) -> float:
        """Return the norm of the gradient at the model's output.

        If this norm is zero, infinite or NaN, return the norm at the last layer with a positive, finite norm. If there
        is no such layer, return 0.
        """
        statistics = (self._join_runs(name) for name in (None, *reversed(self.order)))
        norms = (gradient.norm for gradient in statistics if gradient is not None)
        return next((norm for norm in norms if 0 < norm < math.inf), 0.0)

    def _join_runs(self, name: str | None) -> Statistics | None:
        runs = [to_statistics(*measured) for measured in self._activations.get(name, ())]
        return join(runs) if runs else None

    def describe(self, name: str, reference: float) -> LayerGradients:
        layer, parameters = self._layers[name], []
        for key, parameter in layer.named_parameters(recurse=False):
            measurement = self._parameters.get(parameter)
            gradient = None if measurement is None else to_statistics(*measurement)
            parameters.append(ParameterGradient(key, measure(parameter)[0].item(), gradient))
        output = self._join_runs(name)
        gradients = LayerGradients(name, type(layer).__name__, self._runs[name], output, tuple(parameters))
        return replace(gradients, verdict=find_verdict(gradients, reference))


def find_verdict(layer: LayerGradients, reference: float) -> str | None:
    """Return the verdict on a layer; None if there is no problem.

    `reference` is the norm of the gradient at the model's output. The verdict is "NaN" or "infinite" if the gradient at
    the layer's output or at a parameter contains such a value. It is "no gradient" if the gradient is missing or
    exactly zero, at the output or at all parameters. It is "vanishing" or "exploding" if the norm at the layer's output
    is below 1e-4 or above 1e4 times `reference`.
    """
    parameters = [parameter.gradient for parameter in layer.parameters]
    gradients = [gradient for gradient in (layer.activations, *parameters) if gradient is not None]
    if any(gradient.nans for gradient in gradients):
        return NAN
    if any(gradient.infinities for gradient in gradients):
        return INFINITE
    for group in ([layer.activations] if layer.runs else [], parameters):
        if group and all(gradient is None or gradient.zeros == 1 for gradient in group):
            return NO_GRADIENT
    if layer.activations is None or not 0 < reference < math.inf:
        return None
    ratio = layer.activations.norm / reference
    return VANISHING if ratio < MIN_NORM_RATIO else EXPLODING if ratio > MAX_NORM_RATIO else None


def rms(gradient: Statistics) -> float:
    """Return the root mean square of the values. Unlike the norm, it does not grow with the number of values."""
    return gradient.norm / math.sqrt(gradient.count)


def join(parts: Sequence[Statistics]) -> Statistics:
    """Combine the statistics of several tensors into the statistics of all their values."""
    if len(parts) == 1:
        return parts[0]
    count = sum(part.count for part in parts)
    mean = sum(part.mean * part.count for part in parts) / count
    squares = sum(part.std**2 * (part.count - 1) + (part.mean - mean) ** 2 * part.count for part in parts)
    zeros = sum(part.zeros * part.count for part in parts) / count
    _, norms, _, _, _, peaks, nans, infinities = zip(*map(astuple, parts))
    std = math.sqrt(squares / (count - 1))
    return Statistics(count, math.hypot(*norms), mean, std, zeros, max(peaks), sum(nans), sum(infinities))


def to_statistics(count: int, numbers: Tensor) -> Statistics:
    """Return the statistics of `count` values from the numbers that `measure` returned."""
    norm, mean, std, zeros, largest, nans, infinities = numbers.tolist()
    return Statistics(count, norm, mean, std, zeros, largest, int(nans), int(infinities))


@torch.no_grad()
def measure(tensor: Tensor) -> Tensor:
    """Return the fields of `Statistics` except `count`, as a float64 tensor (7,) on the tensor's device.

    The function does not wait for a GPU. For every dtype, layout and scale, the relative error is at most 1e-6. MPS has
    no float64, so the result is float32 there. A complex number counts as two values, its real and imaginary part.
    """
    tensor = tensor.detach()
    if tensor.is_nested:
        tensor = torch.cat([part.reshape(-1) for part in tensor.unbind()])
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    # Sort the axes by stride, so that flattening does not copy the values.
    strides = tensor.stride()
    values = tensor.permute(sorted(range(tensor.ndim), key=lambda axis: -strides[axis])).reshape(-1)
    dtype = torch.float32 if values.device.type == "mps" else torch.float64
    if not values.numel():
        return values.new_tensor([0, math.nan, math.nan, math.nan, 0, 0, 0], dtype=dtype)
    if values.device.type != "cpu":
        return measure_whole(values, dtype)
    return torch.tensor(_measure_in_chunks(values), dtype=dtype, device="cpu")


def measure_whole(values: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the result of `measure` for values (n,), in a few operations that do not wait for the device."""
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float() if values.is_floating_point() else values.to(dtype)
    count = values.numel()
    mean = values.mean(dtype=dtype)
    centre = mean.to(values.dtype)
    # `centre` is the mean, rounded to the dtype of the values. The differences then keep this dtype, which saves
    # memory. The last term corrects the rounding of the mean.
    squares = torch.linalg.vector_norm(values - centre, dtype=dtype) ** 2 - count * (mean - centre) ** 2
    low, high = values.aminmax()
    numbers = [
        torch.linalg.vector_norm(values, dtype=dtype), mean, (squares.clamp(min=0) / max(1, count - 1)).sqrt(),
        (values == 0).sum().to(dtype) / count, torch.maximum(-low, high), values.isnan().sum(), values.isinf().sum(),
    ]  # fmt: skip
    return torch.stack([number.to(dtype) for number in numbers])


def _measure_in_chunks(values: Tensor) -> list[float]:
    """Return the result of `measure` for values (n,) on the CPU, in chunks that fit into the cache."""
    count = len(values)
    total, squares, largest, zeros, nans, infinities = _sum_up(values)
    if nans or infinities:
        extreme = math.nan if nans else math.inf
        return [extreme, total / count, math.nan, zeros / count, extreme, nans, infinities]
    if largest and not MIN_SQUARE_SUM < squares < MAX_SQUARE_SUM:  # Such sums are possible only for values in float64.
        norm, mean, std, zero_share, *_ = _measure_in_chunks(values / largest)
        return [norm * largest, mean * largest, std * largest, zero_share, largest, 0, 0]
    spread = squares - total / count * total
    if spread <= MIN_RELATIVE_SPREAD * squares:
        total_deviation, squared_deviation, *_ = _sum_up(values.double() - total / count)
        spread = max(0.0, squared_deviation - total_deviation / count * total_deviation)
    std = math.sqrt(spread / max(1, count - 1))
    return [math.sqrt(squares), total / count, std, zeros / count, largest, 0, 0]


def _sum_up(values: Tensor) -> tuple[float, float, float, int, int, int]:
    """Return the sum, the sum of squares, the largest absolute value, and the numbers of zeros, NaN and infinities."""
    size = CHUNK_VALUES * min(MAX_CHUNK_THREADS, torch.get_num_threads())
    buffer = torch.empty(min(size, len(values)), dtype=torch.float64, device="cpu")
    total = squares = largest = 0.0
    zeros = nans = infinities = 0
    for chunk in values.split(size):
        part = buffer[: len(chunk)].copy_(chunk)
        low, high = (number.item() for number in part.aminmax())
        total += part.sum().item()
        squares += torch.dot(part, part).item()
        largest = max(largest, -low, high)
        zeros += int(np.count_nonzero(part.numpy() == 0))  # `torch.count_nonzero` is slower.
        if not (math.isfinite(low) and math.isfinite(high)):
            nans += int(np.count_nonzero(np.isnan(part.numpy())))
            infinities += int(np.count_nonzero(np.isinf(part.numpy())))
    return total, squares, largest, zeros, nans, infinities
