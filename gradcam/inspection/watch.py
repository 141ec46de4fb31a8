"""Watch the steps of a training loop for NaN or infinite gradients, and find the layer with the first such gradient."""

from __future__ import annotations

import contextlib
import math
import sys
import traceback
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import GradientError
from gradcam.hooks import pytorch
from gradcam.hooks.autograd import GradientHook
from gradcam.hooks.containers import list_tensors, version_of
from gradcam.hooks.hooks import Hooks, in_own_pass, is_backward_running
from gradcam.inspection.selection import Layers, RunCheck, refuse_compiled, select_layers
from gradcam.layers.find import unwrap
from gradcam.options import accept_old_parameters, argument_error

OUTPUT = "output"
NAN, INFINITE = "NaN", "infinite"
REACTIONS = ("warn", "raise")


class GradientWarning(UserWarning):
    """A gradient is NaN or infinite during training.

    Examples
    --------
    >>> import torch, warnings
    >>> from gradcam import inspection
    >>> model = torch.nn.Linear(2, 1)
    >>> with warnings.catch_warnings(record=True) as said, inspection.watch_gradients(model):
    ...     warnings.simplefilter("always", inspection.GradientWarning)
    ...     (model(torch.ones(1, 2)) * float("nan")).sum().backward()
    >>> said[0].category.__name__
    'GradientWarning'
    """


@dataclass(frozen=True)
class Discovery:
    """The first NaN or infinite gradient in a backward pass.

    Attributes
    ----------
    step : int
        The number of the training step, counted from 1 in each `watch_gradients` context.
    layer : str
        The layer's dotted name, "" for the model itself.
    tensor : str
        "output", or the parameter's name in the layer.
    kind : str
        "NaN" or "infinite". If the gradient contains both, "NaN".
    count : int or None
        The number of NaN and infinite values. None on other devices than the CPU, because counting there would slow
        training down.
    cause : str or None
        The first layer in the forward pass whose output had NaN or infinite values; None if all outputs were finite.

    Examples
    --------
    >>> import torch, warnings
    >>> from gradcam import inspection
    >>> model = torch.nn.Linear(2, 1)
    >>> with warnings.catch_warnings(), inspection.watch_gradients(model) as watch:
    ...     warnings.simplefilter("ignore")
    ...     (model(torch.ones(1, 2)) * float("nan")).sum().backward()
    >>> discovery: inspection.Discovery = watch.discoveries[0]
    >>> discovery.step, discovery.tensor, discovery.kind
    (1, 'output', 'NaN')
    """

    step: int
    layer: str
    tensor: str
    kind: str
    count: int | None
    cause: str | None

    def __str__(self) -> str:
        values = "" if self.count is None else f" in {self.count} value{'' if self.count == 1 else 's'}"
        place, layer = "output" if self.tensor == OUTPUT else f"parameter '{self.tensor}'", _layer_text(self.layer)
        fact = f"the gradient at the {place} of {layer} is {self.kind}{values}"
        start = f"Step {self.step}: {fact}, the first such gradient in the backward pass."
        if self.cause is not None:
            cause = f"the first non-finite output is the output of {_layer_text(self.cause)}"
            return f"{start} The problem began in the forward pass: {cause}."
        location = f"between {layer} and the loss" if self.tensor == OUTPUT else f"inside {layer}"
        return f"{start} The forward pass was finite: check the operations {location}."


class Watch:
    """The results of `watch_gradients` so far.

    Attributes
    ----------
    discoveries : tuple of Discovery
        The first NaN or infinite gradient after each period of finite gradients.

    Examples
    --------
    >>> import torch
    >>> from gradcam import inspection
    >>> model = torch.nn.Linear(2, 1)
    >>> with inspection.watch_gradients(model) as watch:
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> watch.discoveries
    ()
    """

    def __init__(self) -> None:
        self.discoveries: tuple[Discovery, ...] = ()


@accept_old_parameters
@contextlib.contextmanager
def watch_gradients(model: nn.Module, layers: Layers | None = None, *, on_nonfinite: str = "warn") -> Iterator[Watch]:
    """Watch a training loop, and warn of the first layer with a NaN or infinite gradient.

    The first layer is the first in the backward pass, so this layer is nearest to the loss. After a report, the next
    report can only follow once a step has had only finite gradients. Training does not change: results are identical to
    the bit. Only the thread that entered the context is watched. On a GPU, each backward pass is synchronised once, at
    its end. With float16 and a `GradScaler`, an occasional infinite gradient is normal, because `GradScaler` uses
    infinite gradients to find its scale. Gradients of outputs that autograd does not record, and of parameters that are
    unfrozen later, are not watched.

    Parameters
    ----------
    model : nn.Module
        The model in training.
    layers : str, nn.Module, or a sequence of them, default None
        Names, patterns or modules. The outputs of these layers are watched, and the parameters of these layers and
        their submodules. None means all layers. Parameters are watched if they require gradients when the context
        begins.
    on_nonfinite : str, default "warn"
        "warn" issues a `GradientWarning`, and "raise" raises `GradientError`. The warning and the error come at the end
        of the backward pass, before an optimiser uses the gradients.

    Yields
    ------
    Watch
        An object with `discoveries`, to which each report adds an entry.

    Raises
    ------
    GradientError
        If `on_nonfinite` is unknown or, with "raise", if a gradient is NaN or infinite.
    ModelError
        If the model is compiled.
    LayerError
        If a layer does not exist. At the end of the context: if the model ran, but a requested layer did not.

    Examples
    --------
    >>> import torch
    >>> from gradcam import errors, inspection
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> try:
    ...     with inspection.watch_gradients(model, on_nonfinite="raise"):
    ...         (model(torch.ones(1, 2)) * float("nan")).sum().backward()
    ... except errors.GradientError:
    ...     print("NaN")
    NaN
    """
    if on_nonfinite not in REACTIONS:
        raise argument_error(on_nonfinite, "on_nonfinite", f"one of {', '.join(REACTIONS)}.", GradientError)
    refuse_compiled(model)
    model = unwrap(model)
    modules = dict(model.named_modules()) if layers is None else select_layers(model, layers)
    modules = {name: module for name, module in modules.items() if not isinstance(module, torch.jit.ScriptModule)}
    # If `layers` is None, no layer is requested, so a layer that never runs is no error.
    run_check = RunCheck(model, () if layers is None else layers)
    watcher = StepWatcher(on_nonfinite)

    def watch_output(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if in_own_pass():  # Passes that gradcam itself runs are not watched.
            return
        is_repeated = is_backward_running()  # A checkpoint repeats the run in the backward pass.
        if not is_repeated:
            watcher.note_run()
            run_check.note_run(name)
        for tensor in list_tensors(output):
            is_usual = tensor.is_floating_point() and not pytorch.is_functorch_tensor(tensor)
            # If a block returns the output of its last layer, the tensor is already watched.
            if not is_usual or watcher.is_previous_output(tensor):
                continue
            if not is_repeated and (module.training or torch.is_grad_enabled()):
                watcher.note_output(name, tensor)
            if tensor.requires_grad:
                # Hook the tensor itself. If the model changes it in place later, the hook still gets the gradient of
                # the present value.
                hooks.at_gradient(tensor, watcher.make_hook(name, OUTPUT))

    watched_modules = {part for module in modules.values() for part in module.modules()}
    with Hooks() as hooks:
        for name, module in modules.items():
            hooks.after_forward(module, partial(watch_output, name))
        hooks.after_forward(model, run_check.note_model)
        for layer, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False) if module in watched_modules else ():
                if parameter.requires_grad:
                    hooks.at_gradient(parameter, watcher.make_hook(layer, name))
        yield watcher.watch
    run_check.require_runs()


class StepWatcher:
    """Inspects the outputs and gradients of each training step, and reports the first non-finite gradient to `watch`.

    `on_nonfinite` is "warn" or "raise".
    """

    def __init__(self, on_nonfinite: str) -> None:
        self.watch = Watch()
        self._on_nonfinite = on_nonfinite
        self._step = 0
        self._is_forward = False
        self._backward_tasks: set[int] = set()  # The ids that autograd gave to the backward passes of this step.
        self._outputs: dict[str, _Inspection] = {}  # The outputs of this step, in forward order.
        self._gradients: list[tuple[str, str, _Inspection]] = []
        self._previous_output: tuple[weakref.ref[Tensor], int] | None = None
        self._last_bad_step: int | None = None  # The last step with NaN or infinity; None after a finite step.

    def note_run(self) -> None:
        if not self._is_forward:
            self._is_forward = True
            self._outputs.clear()
            self._gradients.clear()  # If an exception ended the last backward pass, gradients are left over.
            self._backward_tasks.clear()

    def is_previous_output(self, tensor: Tensor) -> bool:
        """Return whether the previous call of this method got the same tensor, and the tensor has not changed since."""
        previous, self._previous_output = self._previous_output, (weakref.ref(tensor), version_of(tensor))
        return previous is not None and previous[0]() is tensor and previous[1] == self._previous_output[1]

    def note_output(self, name: str, tensor: Tensor) -> None:
        inspection, earlier = _inspect(tensor), self._outputs.get(name)
        if inspection is None or (earlier is not None and earlier.extremes is None):
            return
        if earlier is not None and earlier.extremes is not None and inspection.extremes is not None:
            inspection = _Inspection(extremes=torch.maximum(earlier.extremes, inspection.extremes))
        self._outputs[name] = inspection

    def make_hook(self, layer: str, tensor: str) -> GradientHook:

        def inspect_gradient(gradient: Tensor) -> None:
            task = pytorch.find_backward_task()
            if task not in self._backward_tasks:
                # The gradient of a parameter may belong to a backward pass of another thread. So only an output starts
                # a new pass.
                if tensor != OUTPUT:
                    return
                self._backward_tasks.add(task)
                self._step += self._is_forward
                self._is_forward = False
                # This callback works in any autograd thread. DistributedDataParallel uses it as well.
                pytorch.call_after_backward(self._end)
            if (inspection := _inspect(gradient)) is not None:
                self._gradients.append((layer, tensor, inspection))

        return inspect_gradient

    def _end(self) -> None:
        gradients, self._gradients = self._gradients, []
        index, kind = _find_first([inspection for _, _, inspection in gradients])
        if kind is None:
            self._last_bad_step = self._last_bad_step if self._step == self._last_bad_step else None
            return
        is_reported, self._last_bad_step = self._last_bad_step is not None, self._step
        if is_reported:
            return
        layer, tensor, inspection = gradients[index]
        cause_index, was_not_finite = _find_first(list(self._outputs.values()))
        cause = None if was_not_finite is None else list(self._outputs)[cause_index]
        discovery = Discovery(self._step, layer, tensor, kind, inspection.count, cause)
        self.watch.discoveries += (discovery,)
        if self._on_nonfinite == "raise":
            raise GradientError(str(discovery))
        warnings.warn(str(discovery), GradientWarning, stacklevel=_find_caller_level())


@dataclass(frozen=True)
class _Inspection:
    """The kind and the number of a tensor's non-finite values.

    On a GPU, the extreme values are stored instead, and the kind is derived from these values later.
    """

    kind: str | None = None
    count: int | None = None
    extremes: Tensor | None = None  # (2,): the negated minimum and the maximum; None on the CPU


def _inspect(tensor: Tensor) -> _Inspection | None:
    values = tensor.detach()
    values = values._values() if values.layout == torch.sparse_coo else values
    values = torch.view_as_real(values) if values.is_complex() else values
    if values.layout != torch.strided or values.is_meta or values.is_nested or not values.numel():
        return None
    if values.device.type != "cpu":
        minimum, maximum = torch.aminmax(values)
        return _Inspection(extremes=torch.stack([-minimum, maximum]).float())
    # If the sum is finite, all values are finite. If the sum is not finite, count the values, because even finite
    # values may have an infinite sum.
    if math.isfinite(values.sum().item()):
        return None
    nans, infinities = int(values.isnan().sum()), int(values.isinf().sum())
    return _Inspection(NAN if nans else INFINITE, nans + infinities) if nans or infinities else None


def _find_first(inspections: Sequence[_Inspection]) -> tuple[int, str | None]:
    """Return the index and kind of the first inspection with NaN or infinite values; (-1, None) if all are finite.

    The values are read from each device at once, so the function waits only once per device.
    """
    kinds = [inspection.kind for inspection in inspections]
    pending: dict[torch.device, dict[int, Tensor]] = defaultdict(dict)
    for index, inspection in enumerate(inspections):
        if inspection.extremes is not None:
            pending[inspection.extremes.device][index] = inspection.extremes
    for extremes in pending.values():
        for index, numbers in zip(extremes, torch.stack(list(extremes.values())).tolist()):
            kinds[index] = _find_kind(numbers)
    return next(((index, kind) for index, kind in enumerate(kinds) if kind is not None), (-1, None))


def _find_kind(extremes: Sequence[float]) -> str | None:
    return NAN if any(map(math.isnan, extremes)) else INFINITE if any(map(math.isinf, extremes)) else None


def _layer_text(layer: str) -> str:
    return f"layer '{layer}'" if layer else "the model"


def _find_caller_level() -> int:
    """Return the stack level of the code that called backward(): the innermost frame outside PyTorch and gradcam."""
    for level, (frame, _) in enumerate(traceback.walk_stack(sys._getframe(1)), 1):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "gradcam"):
            return level
    return 1  # In a thread of autograd, there is no such frame.
