"""Recording what layers give, and what comes back to them, through training steps that the user makes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Generic, Literal, overload

import torch
from torch import Tensor, nn

from gradcam.errors import GradcamError, LayerError, join_names, shorten
from gradcam.hooks import Hooks, is_backward_running
from gradcam.inspection.attendance import Attendance
from gradcam.inspection.runs import follow_layers
from gradcam.inspection.selection import Layers, refuse_compiled, select_layers
from gradcam.inspection.statistics import Statistics
from gradcam.inspection.steps import Readings, Step, Value
from gradcam.inspection.storage import Layout, Numbers, Store, Tensors, fetch
from gradcam.isolation import is_undisturbed
from gradcam.layers import unwrap
from gradcam.passages import GradientHook

KEEPS = ("statistics", "device", "cpu")


@overload
def record(
    model: nn.Module, layers: Layers, *, keep: Literal["statistics"] = ..., every: int = ..., last: int | None = ...
) -> Recorder[Statistics]: ...


@overload
def record(
    model: nn.Module, layers: Layers, *, keep: Literal["device", "cpu"], every: int = ..., last: int | None = ...
) -> Recorder[Tensor]: ...


def record(
    model: nn.Module, layers: Layers, *, keep: str = "statistics", every: int = 1, last: int | None = None
) -> Recorder[Any]:
    """Record activations and gradients of layers in a context through which the model is trained as ever.

    with gradcam.inspection.record(model, "layer*.conv1", every=10) as recorder:
        for images, labels in loader:
            ...                                             # forward, backward, optimizer.step()
    recorder.gradients["layer4.0.conv1"].norm               # of the latest recorded step
    pandas.DataFrame(recorder.rows())

    A step is one run of the model's own forward, in the thread that entered; they are counted from 0, and of these 0,
    `every`, 2 * `every`, ... are recorded. A run under torch.no_grad() is a step too, which has activations alone; what
    gradcam itself runs, such as gradcam.explain, is none. A gradient belongs to the run that it is the gradient of,
    whenever it comes, as long as the context is open; of several backward passes through one run, the last one's is kept.
    It is as large as it came: with a GradScaler or gradient accumulation, scaled as the loss is.

    `keep`: "statistics", which stay on the device unread, so that no step waits for a GPU: seven numbers for each;
    or the tensors themselves, as snapshots, on their own "device" or on the "cpu", which waits for the GPU.
    `last`: keep no more than so many recorded steps, the latest; None keeps all.

    Nothing about the training changes: losses and parameters are the same to the bit. Gradients are taken by pairs of a
    forward hook and a backward hook that stand what is done in place behind a layer, and repetition by checkpoints. They
    are those of the tensor, all that uses it together, as `retain_grad()` shows them: where a layer gives back its input,
    or a block what its last part gave, both have the same.

    Raises `LayerError` for a layer that does not exist, or a pattern that fits none; at the end, without another error
    under way, where one never ran although the model did; and where one gives no floating tensor. Raises `ModelError` for a
    compiled model, for one under torch.func, and at the end where all ran inside a function compiled before.
    """
    if keep not in KEEPS:
        raise GradcamError(f"keep is {shorten(keep)}, expected one of {join_names(KEEPS)}.")
    for name, value in {"every": every, "last": 1 if last is None else last}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise GradcamError(f"{name} is {shorten(value)}, expected a whole number of steps, 1 or more.")
    return Recorder(model, layers, keep, every, last)


class Recorder(Generic[Value]):
    """What `record` gives. It may be entered again after its end, and then goes on counting."""

    def __init__(self, model: nn.Module, layers: Layers, keep: str, every: int, last: int | None) -> None:
        self._model = model
        wanted = layers if isinstance(layers, (str, nn.Module)) or not isinstance(layers, Iterable) else list(layers)
        self._layers = select_layers(model, wanted)
        self._attendance = Attendance(model, wanted)
        self._keep, self._every = keep, every
        self._layouts: dict[Layout, Layout] = {}
        self._steps: deque[Step[Value]] = deque(maxlen=last)
        self._current: Step[Value] | None = None
        self._count = 0  # of the model's runs
        self._hooks: Hooks | None = None

    def __enter__(self) -> Recorder[Value]:
        if self._hooks is not None:
            raise GradcamError(
                "This recorder is open already: leave its context first, or call record() for another one."
            )
        refuse_compiled(self._model)
        self._current = None
        self._hooks = Hooks().__enter__()
        self._hooks.before_forward(unwrap(self._model), self._begin)
        follow_layers(self._hooks, self._layers, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(kind, error, traceback)
        self._current = None
        if kind is None:
            self._attendance.require_runs()

    def __repr__(self) -> str:
        return f"Recorder({len(self._layers)} layers, {len(self._steps)} of {self._count} steps, keep={self._keep!r})"

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that are recorded, the latest last."""
        return [step.number for step in self._steps]

    def at(self, step: int) -> Step[Value]:
        """A recorded step: its `.activations` and `.gradients`. Raises `LayerError` for one that is not recorded."""
        for found in self._steps:
            if found.number == step:
                return found
        known = f"there are {shorten(self.steps)}" if self._steps else "there is none"
        raise LayerError(f"Step {shorten(step)} is not recorded: {known}.")

    @property
    def activations(self) -> Readings[Value]:
        """What the layers gave in the latest recorded step, by name."""
        return self._latest().activations

    @property
    def gradients(self) -> Readings[Value]:
        """The gradients with respect to what the layers gave in the latest recorded step, by name."""
        return self._latest().gradients

    def rows(self) -> list[dict[str, Any]]:
        """Statistics of all recorded steps as flat dicts, for pandas or a CSV file.

        Keys: step, layer, run (of the layer in this step, from 0), kind ("activation" or "gradient"), and the fields of
        `Statistics`. In order of the steps; within one the activations first, in order of execution.
        """
        fetch(step.store for step in self._steps if isinstance(step.store, Numbers))
        return [row for step in self._steps for row in step.rows()]

    def _latest(self) -> Step[Value]:
        if not self._steps:
            raise LayerError(
                "No step is recorded yet: a step is a run of the recorded model itself, model(images), in the thread that "
                "entered the context, and not as part of a compiled function."
            )
        return self._steps[-1]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_backward_running() or is_undisturbed():
            return
        if self._current is not None:
            self._current.store.pack()
        self._current = None
        if self._count % self._every == 0:
            grad = torch.is_grad_enabled()
            self._current = Step(self._count, list(self._layers), self._new_store(), is_differentiable=grad)
            self._steps.append(self._current)
        self._count += 1
        self._attendance.note_model()

    def _new_store(self) -> Store:
        if self._keep == "statistics":
            return Numbers(self._layouts)
        return Tensors("cpu" if self._keep == "cpu" else None)

    def _look(self, name: str, activations: Tensor) -> GradientHook | None:
        if is_undisturbed():
            return None
        self._attendance.note_run(name)
        step = self._current
        if step is None:
            return None
        with torch.inference_mode(False), torch.no_grad():
            keep = step.add_run(name, activations)

        def keep_gradient(gradient: Tensor) -> None:
            with torch.no_grad():
                keep(gradient.detach())

        return keep_gradient
