"""Record the outputs of layers, and the gradients at these outputs, during the user's own training steps."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn

from gradcam.errors import GradcamError, LayerError, find_similar_names, join_names, shorten
from gradcam.hooks.autograd import GradientHook
from gradcam.hooks.hooks import Hooks, in_own_pass, is_backward_running
from gradcam.inspection.flow import Statistics, measure, to_statistics
from gradcam.inspection.selection import Layers, RunCheck, follow_layers, refuse_compiled, select_layers, to_layer_list
from gradcam.layers.find import unwrap
from gradcam.options import check_choice, check_count

ACTIVATION, GRADIENT = "activation", "gradient"
KEEP_CHOICES = ("statistics", "device", "cpu")
Value = TypeVar("Value", bound="Tensor | Statistics")


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
    """Record activations and gradients of layers during training, in a context.

    A step is one forward pass of the whole model, in the thread that entered the context. Under `torch.no_grad()`, a
    step has activations only. Passes that gradcam itself runs are not steps. Gradients are stored in the step of their
    forward pass, even if later steps have already run. If several backward passes go through one step, only the last
    gradient is stored. If the loss is scaled, by a GradScaler or for gradient accumulation, the recorded gradients are
    scaled as well. Training does not change: losses and parameters are identical to the bit.

    Parameters
    ----------
    model : nn.Module
        The model in training.
    layers : str, nn.Module, or a sequence of them
        Dotted names, patterns such as `layer*.conv1`, and modules.
    keep : str, default "statistics"
        "statistics" stores seven numbers per tensor on the tensor's device, so that no step waits for a GPU. "device"
        stores a copy of each tensor on its device. "cpu" copies each tensor to the CPU, so each step waits for the GPU.
    every : int, default 1
        The interval between recorded steps: steps 0, `every`, 2 * `every` and so on are recorded.
    last : int, default None
        The number of latest recorded steps to keep; None keeps all.

    Returns
    -------
    Recorder
        A context manager. Its `activations` and `gradients` contain the values of the latest step, by layer. Its
        `rows()` are statistics of all steps, for pandas.

    Raises
    ------
    LayerError
        If a layer does not exist, no layer matches a pattern, or a layer returns no floating-point tensor. At the end
        of the context: if the model ran, but a requested layer did not.
    ModelError
        If the model is compiled or runs under torch.func. At the end of the context: if the model ran only inside a
        compiled function.
    GradcamError
        If `keep`, `every` or `last` is invalid.

    Notes
    -----
    As with `retain_grad()`, a gradient is the sum over all uses of the output tensor. If two modules return the same
    tensor, such as a block and its last submodule, their gradients are equal.

    Examples
    --------
    >>> import torch, torchvision
    >>> from gradcam import inspection
    >>> model = torchvision.models.resnet18(weights=None, num_classes=2)
    >>> with inspection.record(model, "layer*.0.conv1", every=2) as recorder:
    ...     for _ in range(3):
    ...         model(torch.rand(2, 3, 64, 64)).sum().backward()
    >>> recorder.steps, list(recorder.gradients)[:2]
    ([0, 2], ['layer4.0.conv1', 'layer3.0.conv1'])
    """
    check_choice(keep, "keep", KEEP_CHOICES)
    for name, value in {"every": every, "last": 1 if last is None else last}.items():
        check_count(value, name, "a whole number of steps, 1 or more.")
    return Recorder(model, layers, keep, every, last)


class Recorder(Generic[Value]):
    """The result of `record`. You can enter the context several times, and the step numbers continue.

    Parameters
    ----------
    model : nn.Module
        As in `record`.
    layers : str, nn.Module, or a sequence of them
        As in `record`.
    keep : str
        As in `record`.
    every : int
        As in `record`.
    last : int or None
        As in `record`.

    Examples
    --------
    >>> import torch
    >>> from gradcam import inspection
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())
    >>> with inspection.record(model, "0", keep="device") as recorder:
    ...     model(torch.rand(3, 4)).sum().backward()
    >>> recorder.steps, recorder.activations["0"].shape, recorder.at(0).gradients["0"].shape
    ([0], torch.Size([3, 2]), torch.Size([3, 2]))
    >>> [row["kind"] for row in recorder.rows()]
    ['activation', 'gradient']
    """

    def __init__(self, model: nn.Module, layers: Layers, keep: str, every: int, last: int | None) -> None:
        self._model = model
        requested = to_layer_list(layers)
        self._layers = select_layers(model, requested)
        self._run_check = RunCheck(model, requested)
        self._keep, self._every = keep, every
        self._layouts: dict[Layout, Layout] = {}
        self._steps: deque[Step[Value]] = deque(maxlen=last)
        self._current: Step[Value] | None = None
        self._count = 0  # Number of steps so far, recorded or not.
        self._hooks: Hooks | None = None

    def __enter__(self) -> Recorder[Value]:
        if self._hooks is not None:
            problem = "This recorder is already open"
            raise GradcamError(f"{problem}: leave its context first, or call record() for a second recorder.")
        refuse_compiled(self._model)
        self._hooks = Hooks().__enter__()
        self._hooks.before_forward(unwrap(self._model), self._begin_step)
        follow_layers(self._hooks, self._layers, self._on_activations)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(kind, *error)
        self._current = None
        if kind is None:
            self._run_check.require_runs()

    def __repr__(self) -> str:
        return f"Recorder({len(self._layers)} layers, {len(self._steps)} of {self._count} steps, keep={self._keep!r})"

    @property
    def steps(self) -> list[int]:
        """Return the numbers of the recorded steps, in ascending order."""
        return [step.number for step in self._steps]

    def at(self, step: int) -> Step[Value]:
        """Return a recorded step.

        Parameters
        ----------
        step : int
            The step's number.

        Returns
        -------
        Step
            The step, with ``.activations`` and ``.gradients``.

        Raises
        ------
        LayerError
            If the step is not recorded.
        """
        if (record := next((record for record in self._steps if record.number == step), None)) is not None:
            return record
        available = f"the recorded steps are {shorten(self.steps)}" if self._steps else "no step is recorded"
        raise LayerError(f"Step {shorten(step)} is not recorded: {available}.")

    @property
    def activations(self) -> Readings[Value]:
        """Return the layers' outputs in the latest recorded step, by name."""
        return self._latest().activations

    @property
    def gradients(self) -> Readings[Value]:
        """Return the gradients at the layers' outputs in the latest recorded step, by name."""
        return self._latest().gradients

    def rows(self) -> list[dict[str, Any]]:
        """List statistics of all recorded steps as flat dicts, for pandas or a CSV file.

        The keys are step, layer, run, kind and the fields of `Statistics`. `run` counts the runs of the layer in the
        step, from 0. `kind` is "activation" or "gradient". The dicts are in the order of the steps. Within a step,
        activations come first, in order of execution.
        """
        fetch(step.store for step in self._steps)
        return [row for step in self._steps for row in step.rows()]

    def _latest(self) -> Step[Value]:
        if not self._steps:
            raise LayerError(
                "No step is recorded yet: run the recorded model itself, model(images), in the thread that entered the "
                "context. Do not call the model from a compiled function."
            )
        return self._steps[-1]

    def _begin_step(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_backward_running() or in_own_pass():
            return
        if self._current is not None:
            self._current.store.pack()
        self._current = None
        if self._count % self._every == 0:
            store = RecordStore(self._keep, self._layouts)
            self._current = Step(self._count, list(self._layers), torch.is_grad_enabled(), store)
            self._steps.append(self._current)
        self._count += 1
        self._run_check.note_model()

    def _on_activations(self, name: str, activations: Tensor) -> GradientHook | None:
        if in_own_pass():
            return None
        self._run_check.note_run(name)
        if (step := self._current) is None:
            return None
        run = step.runs[name]
        step.runs[name] += 1

        def store_value(kind: str, tensor: Tensor) -> None:
            with torch.no_grad():
                step.store.add(Key(name, run, kind), tensor)

        with torch.inference_mode(False):
            store_value(ACTIVATION, activations)
        return partial(store_value, GRADIENT)


@dataclass(eq=False, repr=False)
class Step(Generic[Value]):
    """One recorded forward pass of the model.

    Attributes
    ----------
    number : int
        The number of the step, counted from 0. Steps that were not recorded count as well.
    layers : sequence of str
        The names of all recorded layers.
    is_differentiable : bool
        True if gradients were enabled when the model ran.
    store : RecordStore
        The recorded values.
    runs : Counter of str
        The number of times that each layer ran.

    Examples
    --------
    >>> import torch
    >>> from gradcam import inspection
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())
    >>> with inspection.record(model, "0", keep="device") as recorder, torch.no_grad():
    ...     output = model(torch.rand(3, 4))
    >>> step: inspection.Step = recorder.at(0)
    >>> step.number, step.is_differentiable, step.activations["0"].shape
    (0, False, torch.Size([3, 2]))
    """

    number: int
    layers: Sequence[str]
    is_differentiable: bool
    store: RecordStore
    runs: Counter[str] = field(default_factory=Counter)

    @property
    def activations(self) -> Readings[Value]:
        """Return the layers' outputs, by name."""
        return Readings(self.store.read(), ACTIVATION, self)

    @property
    def gradients(self) -> Readings[Value]:
        """Return the gradients at the layers' outputs, by name."""
        return Readings(self.store.read(), GRADIENT, self)

    def rows(self) -> Iterator[dict[str, Any]]:
        """List the step's statistics, as in `Recorder.rows`."""
        for key, value in sorted(self.store.read().items(), key=lambda item: item[0].kind == GRADIENT):
            statistics = value if isinstance(value, Statistics) else to_statistics(value.numel(), measure(value))
            yield {"step": self.number, **key._asdict(), **asdict(statistics)}


class Readings(Mapping["str | tuple[str, int]", Value]):
    """The values of a step by layer: `readings["layer4"]`, or `readings["layer4", 1]` for the layer's second run.

    Raises `LayerError`, which states the reason, if the layer has no value.
    """

    def __init__(self, values: Mapping[Key, Any], kind: str, step: Step[Value]) -> None:
        self._values: dict[Key, Value] = {key: value for key, value in values.items() if key.kind == kind}
        self._run_counts = {key.layer: 1 + key.run for key in values if key.kind == ACTIVATION}
        self._kind, self._step = kind, step

    def __getitem__(self, layer: str | tuple[str, int]) -> Value:
        key, step = self._key(layer), self._step
        if key in self._values:
            return self._values[key]
        runs, number = self._run_counts.get(key.layer, 0), step.number
        if key.layer not in step.layers:
            offers = find_similar_names(str(key.layer), step.layers) or step.layers[:3]
            reason = f"Layer {shorten(key.layer)} is not recorded. Nearest: {join_names(offers)}."
        elif key.run >= runs:
            problem = f"Layer '{key.layer}' ran {runs} times in step {number}"
            reason = f"{problem}: there is no run {key.run}, because the first run is 0."
        elif not step.is_differentiable:
            cause = "torch.no_grad() or similar"
            reason = f"Step {number} was a pass without gradients ({cause}): it has activations, but no gradients."
        else:
            reason = (
                f"No gradient reached layer '{key.layer}' in step {number}: call backward() inside the context. A layer "
                "has no gradient if the loss does not depend on it, or if the layer and all earlier layers are frozen."
            )
        raise LayerError(reason)

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, (str, tuple)) and self._key(layer) in self._values

    def __iter__(self) -> Iterator[str | tuple[str, int]]:
        return iter([(key.layer, key.run) if key.run else key.layer for key in self._values])

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{self._kind}s of step {self._step.number}: {', '.join(map(str, self)) or 'none'}"

    def _key(self, layer: Any) -> Key:
        name, run = (layer, 0) if isinstance(layer, str) else layer
        return Key(name, run, self._kind)


class Key(NamedTuple):
    """The key of a recorded value.

    `run` counts the runs of the layer in the step, from 0. `kind` is "activation" or "gradient".
    """

    layer: str
    run: int
    kind: str


# The keys of a block's rows, each with the number of values in the recorded tensor.
Layout = tuple[tuple[Key, int], ...]


class RecordStore:
    """Stores the latest value for each key: a copy of the tensor, or its statistics.

    `keep` is as in `record`. Statistics stay on the tensor's device until they are read. `pack` stacks the statistics
    into one block with a row per tensor. Steps with the same keys and counts share one `Layout` from `layouts`, which
    saves memory.
    """

    def __init__(self, keep: str, layouts: dict[Layout, Layout]) -> None:
        self._keep, self._layouts = keep, layouts
        self._snapshots: dict[Key, Tensor] = {}
        self._unpacked: dict[Key, tuple[int, Tensor]] = {}
        self._layout: Layout = ()
        self._block: Tensor | None = None

    def add(self, key: Key, tensor: Tensor) -> None:
        if self._keep == "statistics":
            self._unpacked[key] = (tensor.numel(), measure(tensor))
        else:  # Always copy, because the model may change the tensor in place later.
            self._snapshots[key] = tensor.to("cpu", copy=True) if self._keep == "cpu" else tensor.clone()

    def pack(self) -> None:
        """Stack the statistics of all tensors into one tensor.

        If some statistics are on a GPU, the result is on a GPU. A copy to the CPU would wait for the GPU, but a copy to
        a GPU does not wait.
        """
        if not self._unpacked:
            return
        unpacked, self._unpacked = self._unpacked, {}
        rows = self._rows() | unpacked
        tensors = [numbers for _, numbers in rows.values()]
        device = next((numbers.device for numbers in tensors if numbers.device.type != "cpu"), tensors[0].device)
        self._block = torch.stack([numbers.to(device, non_blocking=True) for numbers in tensors])
        layout = tuple((key, count) for key, (count, _) in rows.items())
        self._layout = self._layouts.setdefault(layout, layout)

    def read(self) -> dict[Key, Any]:
        fetch([self])
        return {key: to_statistics(*measurement) for key, measurement in self._rows().items()} | self._snapshots

    def _rows(self) -> dict[Key, tuple[int, Tensor]]:
        blocks = [] if self._block is None else self._block.unbind()
        return {key: (count, numbers) for (key, count), numbers in zip(self._layout, blocks)}


def fetch(stores: Iterable[RecordStore]) -> None:
    """Move the statistics of all steps to the CPU, with a single copy per device."""
    by_device: dict[torch.device, list[tuple[RecordStore, Tensor]]] = defaultdict(list)
    for store in stores:
        store.pack()
        if store._block is not None and store._block.device.type != "cpu":
            by_device[store._block.device].append((store, store._block))
    for entries in by_device.values():
        fetched = torch.cat([block for _, block in entries]).cpu()
        for (store, _), part in zip(entries, fetched.split([len(block) for _, block in entries])):
            store._block = part
