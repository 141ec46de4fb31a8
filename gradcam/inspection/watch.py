"""Steps of a training loop: the first gradient of each that is NaN or infinite, and where that began."""

from __future__ import annotations

import contextlib
import math
import sys
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
from gradcam.hooks.hooks import Hooks, in_own_pass, is_backward_running
from gradcam.hooks.nested import tensors, version_of
from gradcam.inspection.selection import Layers, RunCheck, refuse_compiled, select_layers
from gradcam.layers.find import unwrap
from gradcam.options import accept_old_parameters, refuse

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
    """The first place in a backward pass where a gradient was not finite.

    Attributes
    ----------
    step : int
        The number of the training step, counted from 1 in each `watch_gradients` context.
    layer : str
        The layer's dotted name, "" for the model itself.
    tensor : str
        "output", or the parameter's name in the layer.
    kind : str
        "NaN" or "infinite"; "NaN" if there are both.
    count : int or None
        The number of NaN or infinite values; None on devices other than the CPU, where counting would slow training down.
    cause : str or None
        The first layer in the forward pass whose output was not finite; None if all were finite.

    Examples
    --------
    >>> import torch, warnings
    >>> from gradcam import inspection
    >>> model = torch.nn.Linear(2, 1)
    >>> with warnings.catch_warnings(), inspection.watch_gradients(model) as watch:
    ...     warnings.simplefilter("ignore")
    ...     (model(torch.ones(1, 2)) * float("nan")).sum().backward()
    >>> found: inspection.Discovery = watch.discoveries[0]
    >>> found.step, found.tensor, found.kind
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
        place = "at the output" if self.tensor == OUTPUT else f"at the parameter '{self.tensor}'"
        where = f"{place} of {_say(self.layer)} is {self.kind}{values}"
        start = f"Step {self.step}: the gradient {where}, the first such gradient in the backward pass."
        if self.cause is not None:
            return f"{start} It began in the forward pass: the first non-finite output is that of {_say(self.cause)}."
        where = f"between {_say(self.layer)} and the loss" if self.tensor == OUTPUT else f"inside {_say(self.layer)}"
        return f"{start} The forward pass was finite: check the operations {where}."


class Watch:
    """The results of `watch_gradients` so far.

    Attributes
    ----------
    discoveries : tuple of Discovery
        One for each time that gradients stopped being finite.

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

    The first layer is the one nearest to the loss, in the order of the backward pass. After a report, the next one
    comes only after a step with finite gradients. Training does not change: results are identical to the bit. Only the
    thread that entered the context is watched. Each backward pass waits for a GPU once, at its end. With float16 and a
    `GradScaler`, an occasional infinite gradient is normal: `GradScaler` finds its scale this way. Outputs that
    autograd does not record, and parameters that are unfrozen later, are not watched.

    Parameters
    ----------
    model : nn.Module
        The model in training.
    layers : str, nn.Module, or a sequence of them, default None
        Names, patterns or modules. Their outputs and parameters are watched, including those of submodules. None
        watches the outputs of all layers, and the parameters that require gradients when the context begins.
    on_nonfinite : str, default "warn"
        "warn" issues a `GradientWarning`, "raise" raises `GradientError`; both at the end of the backward pass, before an
        optimiser uses the gradients.

    Yields
    ------
    Watch
        The object whose `discoveries` grow during training.

    Raises
    ------
    GradientError
        If `on_nonfinite` is unknown. If `on_nonfinite` is "raise", also if a gradient is NaN or infinite.
    ModelError
        If the model is compiled.
    LayerError
        If a layer does not exist. Also at the end, if a named layer never ran although the model did.

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
        raise refuse(on_nonfinite, "on_nonfinite", f"one of {', '.join(REACTIONS)}.", GradientError)
    refuse_compiled(model)
    model = unwrap(model)
    every = {name: it for name, it in model.named_modules() if not isinstance(it, torch.jit.ScriptModule)}
    chosen = every if layers is None else select_layers(model, layers)
    run_check = RunCheck(model, () if layers is None else layers)  # nobody asked for each and every one
    steps = Steps(on_nonfinite)

    def look(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if in_own_pass():  # what gradcam runs itself is none of the user's passes
            return
        repeats = is_backward_running()  # a checkpoint does
        if not repeats:
            steps.note_run()
            run_check.note_run(name)
        for tensor in tensors(output):
            if not tensor.is_floating_point() or pytorch.is_functorch_tensor(tensor):
                continue
            if steps.has_just_seen(tensor):  # a block gives what its last part gave
                continue
            if not repeats and (module.training or torch.is_grad_enabled()):
                steps.note_output(name, tensor)
            if tensor.requires_grad:
                # A hook on the tensor, which later operations in place leave with what the layer gave.
                hooks.at_gradient(tensor, steps.keep(name, OUTPUT))

    watched = {part for module in chosen.values() for part in module.modules()}
    with Hooks() as hooks:
        for name, module in chosen.items():
            hooks.after_forward(module, partial(look, name))
        hooks.after_forward(model, run_check.note_model)
        for layer, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False) if module in watched else ():
                if parameter.requires_grad:
                    hooks.at_gradient(parameter, steps.keep(layer, name))
        yield steps.watch
    run_check.require_runs()


class Steps:
    """What hooks see of one step after another. `watch`: what came of it. `on_nonfinite`: "warn" or "raise"."""

    def __init__(self, on_nonfinite: str) -> None:
        self.watch = Watch()
        self._on_nonfinite = on_nonfinite
        self._step = 0
        self._is_forward = False
        self._tasks: set[int] = set()  # backward passes of this step, as autograd numbers them
        self._outputs: dict[str, _Look] = {}  # of this step, in the order of the forward pass
        self._gradients: list[tuple[str, str, _Look]] = []
        self._last: tuple[weakref.ref[Tensor], int] | None = None
        self._bad_step: int | None = None  # the last one that was not finite, while none after it was

    def note_run(self) -> None:
        if not self._is_forward:
            self._is_forward = True
            self._outputs.clear()
            self._gradients.clear()  # of a backward pass that an error broke off
            self._tasks.clear()

    def has_just_seen(self, tensor: Tensor) -> bool:
        """Whether it is the very tensor that was asked about last, and nothing has changed it."""
        last, self._last = self._last, (weakref.ref(tensor), version_of(tensor))
        return last is not None and last[0]() is tensor and last[1] == self._last[1]

    def note_output(self, name: str, tensor: Tensor) -> None:
        found, before = _look(tensor), self._outputs.get(name)
        if found is None or (before is not None and before.extremes is None):
            return
        if before is not None and before.extremes is not None and found.extremes is not None:
            found = _Look(extremes=torch.maximum(before.extremes, found.extremes))
        self._outputs[name] = found

    def keep(self, layer: str, tensor: str) -> GradientHook:

        def look(gradient: Tensor) -> None:
            task = pytorch.find_backward_task()
            if task not in self._tasks:
                if tensor != OUTPUT:  # a parameter's gradient may be another thread's
                    return
                self._tasks.add(task)
                self._step += self._is_forward
                self._is_forward = False
                # As DistributedDataParallel does: called when the backward pass has ended, in whichever thread that is.
                pytorch.call_after_backward(self._end)
            if (found := _look(gradient)) is not None:
                self._gradients.append((layer, tensor, found))

        return look

    def _end(self) -> None:
        gradients, self._gradients = self._gradients, []
        index, kind = _first([look for _, _, look in gradients])
        if kind is None:
            self._bad_step = self._bad_step if self._step == self._bad_step else None
            return
        is_known, self._bad_step = self._bad_step is not None, self._step
        if is_known:
            return
        layer, tensor, look = gradients[index]
        first, was_not_finite = _first(list(self._outputs.values()))
        cause = None if was_not_finite is None else list(self._outputs)[first]
        found = Discovery(self._step, layer, tensor, kind, look.count, cause)
        self.watch.discoveries += (found,)
        if self._on_nonfinite == "raise":
            raise GradientError(str(found))
        warnings.warn(str(found), GradientWarning, stacklevel=_level_of_caller())


@dataclass(frozen=True)
class _Look:
    """What is wrong with a tensor; on a device that runs ahead, what will tell."""

    kind: str | None = None
    count: int | None = None
    extremes: Tensor | None = None  # (2,): the least one's negative, and the largest


def _look(tensor: Tensor) -> _Look | None:
    values = tensor.detach()
    values = values._values() if values.layout == torch.sparse_coo else values
    values = torch.view_as_real(values) if values.is_complex() else values
    if values.layout != torch.strided or values.is_meta or values.is_nested or not values.numel():
        return None
    if values.device.type != "cpu":
        least, largest = torch.aminmax(values)
        return _Look(extremes=torch.stack([-least, largest]).float())
    if math.isfinite(values.sum().item()):  # the fastest pass over all values; a sum of finite ones may be infinite
        return None
    nans, infinities = int(values.isnan().sum()), int(values.isinf().sum())
    return _Look(NAN if nans else INFINITE, nans + infinities) if nans or infinities else None


def _first(looks: Sequence[_Look]) -> tuple[int, str | None]:
    """Which one is the first that is not finite, and its kind, None for none. Devices are waited for here, once each."""
    waiting: dict[torch.device, list[Tensor]] = defaultdict(list)
    for look in looks:
        if look.extremes is not None:
            waiting[look.extremes.device].append(look.extremes)
    known = {device: iter(torch.stack(extremes).tolist()) for device, extremes in waiting.items()}
    kinds = [look.kind if look.extremes is None else _kind(next(known[look.extremes.device])) for look in looks]
    return next(((index, kind) for index, kind in enumerate(kinds) if kind is not None), (-1, None))


def _kind(extremes: Sequence[float]) -> str | None:
    return NAN if any(map(math.isnan, extremes)) else INFINITE if any(map(math.isinf, extremes)) else None


def _say(layer: str) -> str:
    return f"layer '{layer}'" if layer else "the model"


def _level_of_caller() -> int:
    """How far up the code is that called backward(): the first that is neither PyTorch's nor this package's."""
    level, frame = 1, sys._getframe(1).f_back
    while frame is not None:
        level += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "gradcam"):
            return level
        frame = frame.f_back
    return 1  # in a thread of autograd's own
