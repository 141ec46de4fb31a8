"""Trace one forward pass: every call of every module, with its shapes, sizes, cost and time."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import isnan, nan
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradcam.errors import format_fields, join_names
from gradcam.hooks.containers import list_tensors, map_tensors, to_inputs
from gradcam.hooks.hooks import Hooks
from gradcam.hooks.preserve import preserve_state
from gradcam.inspection.counters import Clock, MultiplyAdds, Storages
from gradcam.layers.find import unwrap
from gradcam.options import check_count, keep_old_names

Shape = tuple[int, ...]


@keep_old_names
@dataclass(frozen=True)
class Call:
    """One call of a module. The counts and the time include the calls of submodules.

    Attributes
    ----------
    name : str
        The module's dotted name, "" for the model itself.
    type : str
        The module's class.
    depth : int
        The number of calls that contain this call.
    inputs : tuple of shapes
        The shapes of all input tensors; -1 for the ragged axis of a nested tensor.
    outputs : tuple of shapes
        The shapes of all output tensors; empty if the call raised an exception.
    dtypes : tuple of str
        The outputs' dtypes, such as "float32".
    parameters : int
        The number of values in the module's parameters. Shared parameters are counted once.
    multiply_adds : int or None
        The multiply-adds of the call. None if the cost of an operator is unknown.
    activation_bytes : int
        The memory of all module outputs that were created during the call. Views and in-place changes add no memory.
    seconds : float or None
        The time of the call. None if there were no timed passes, on the meta device, or if the passes differ in their
        calls.
    run : int
        The position of this call among the module's calls in the pass, counted from 1.
    runs : int
        The number of the module's calls in the pass.
    other_names : tuple of str
        The module's other names in the model.
    tied : tuple of str
        If this module shares parameters with other modules, the names of these parameters in the other modules.

    Examples
    --------
    >>> import torch
    >>> from gradcam.inspection import Call, trace
    >>> last: Call = trace(torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU()), torch.rand(1, 1, 8, 8)).calls[-1]
    >>> last.name, last.type, last.outputs
    ('1', 'ReLU', ((1, 2, 6, 6),))
    """

    name: str
    type: str
    depth: int
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    parameters: int
    multiply_adds: int | None
    activation_bytes: int
    seconds: float | None
    run: int
    runs: int
    other_names: tuple[str, ...]
    tied: tuple[str, ...]

    __repr__ = format_fields


@dataclass(frozen=True)
class Trace:
    """The calls of a forward pass, in order of their start.

    The first entry is the call of the model itself; its numbers are the totals.

    Attributes
    ----------
    calls : tuple of Call
        All calls.
    device : str
        The device.
    notes : tuple of str
        Limitations of the trace.

    Examples
    --------
    >>> import torch
    >>> from gradcam import inspection
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())
    >>> trace = inspection.trace(model, torch.rand(3, 4), rounds=0)
    >>> trace.parameters, trace.multiply_adds, trace.activation_bytes, trace.seconds
    (10, 24, 48, None)
    """

    calls: tuple[Call, ...] = field(repr=False)
    device: str
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Return the number of values in the model's parameters. Shared parameters are counted once."""
        return self.calls[0].parameters

    @property
    def multiply_adds(self) -> int | None:
        """Return the multiply-adds of the whole pass."""
        return self.calls[0].multiply_adds

    @property
    def activation_bytes(self) -> int:
        """Return the memory of all module outputs. Shared memory is counted once."""
        return self.calls[0].activation_bytes

    @property
    def seconds(self) -> float | None:
        """Return the time of the whole pass, which includes the hooks on all modules."""
        return self.calls[0].seconds

    def __repr__(self) -> str:
        cost = "unknown" if self.multiply_adds is None else f"{self.multiply_adds:,}"
        time = "" if self.seconds is None else f", {1000 * self.seconds:.1f} ms"
        size = f"{self.parameters:,} parameters, {cost} multiply-adds, {self.activation_bytes:,} bytes of activations"
        return f"Trace({self.calls[0].type} on {self.device}: {len(self.calls)} calls, {size}{time})"


def trace(model: nn.Module, images: Any, *, rounds: int = 3) -> Trace:
    """Trace every call of every module of a model in one forward pass.

    Each pass runs in evaluation mode, without gradients, from the same random state and on a copy of the images. The
    model is left unchanged. On the meta device nothing is computed, and there are no times.

    Parameters
    ----------
    model : nn.Module
        Any model.
    images : Tensor, tuple or mapping
        The model's input. The input may contain any tensors, not only images. A tuple is passed as positional
        arguments, a mapping as keyword arguments.
    rounds : int, default 3
        The number of timed passes. Times are medians over these passes. If 0, no times are measured. Before the timed
        passes, one pass counts operations.

    Returns
    -------
    Trace
        The calls, in order of execution. `pandas.DataFrame(trace.calls)` converts the calls to a table.

    Raises
    ------
    ModelError
        If `model` is not a module.
    ImageError
        If `images` contains no tensor.
    GradcamError
        If `rounds` is invalid. Errors that the model raises are passed on. Since Python 3.11, the errors have a note
        that names the layer.

    Notes
    -----
    Multiply-adds of matrix products, convolutions, attention and recurrent layers are counted. A multiply-add is two
    floating-point operations (FLOPs). Times include the hooks, which take some microseconds per call. Because of the
    hooks, PyTorch does not use its fast path for `nn.TransformerEncoderLayer`. Modules whose `forward` is called
    directly, and TorchScript, are not traced.

    Examples
    --------
    >>> import torch, torchvision
    >>> from gradcam import inspection
    >>> trace = inspection.trace(torchvision.models.resnet18(weights=None), torch.rand(1, 3, 224, 224), rounds=0)
    >>> trace.calls[1].name, trace.calls[1].outputs, f"{trace.multiply_adds / 1e9:.2f} G"
    ('conv1', ((1, 64, 112, 112),), '1.81 G')
    """
    check_count(rounds, "rounds", "the number of timed passes: 0, 1, 2, ...", least=0)
    model = unwrap(model)
    args, kwargs = to_inputs(images)
    model_tensors = [*model.parameters(), *model.buffers()]
    is_meta = any(tensor.is_meta for tensor in model_tensors or list_tensors((args, kwargs)))
    if is_meta:
        args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to("meta"))
    devices = list(dict.fromkeys(tensor.device for tensor in chain(model_tensors, list_tensors((args, kwargs)))))
    # Leave out scripted modules, which do not support hooks, and the wrappers of torch.compile, which are not modules
    # of the user's model.
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, torch.jit.ScriptModule) and not hasattr(module, "_orig_mod"):
            names[module].append(".".join(part for part in name.split(".") if part != "_orig_mod"))
    subject = TracedModel(model, names, args, kwargs)
    counted_log = run_counted_pass(subject)
    timed_passes = [run_timed_pass(subject, Clock(devices)) for _ in range(0 if is_meta else rounds)]
    passes_agree = all(log.order == counted_log.order for log, _ in timed_passes)
    columns = zip(*(column for _, column in timed_passes)) if passes_agree else ()
    # A call that raised an exception has no time.
    seconds = [None if isnan(column[0]) else median(column) for column in columns]
    calls = _to_calls(names, counted_log.entries, seconds or [None] * len(counted_log.entries))
    notes = [] if passes_agree else ["The model's calls differ between passes, so no times are listed."]
    scripts = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    outermost = [name for name in scripts if not any(name.startswith(f"{outer_name}.") for outer_name in scripts)]
    if outermost:
        note = f"Hooks cannot follow TorchScript, so the calls inside {join_names(outermost[:3])} are not listed."
        notes.insert(0, note)
    return Trace(calls, ", ".join(map(str, devices)), tuple(notes))


def _to_calls(
    names: Mapping[nn.Module, Sequence[str]], entries: Sequence[TraceEntry], seconds: Sequence[float | None]
) -> tuple[Call, ...]:
    runs = Counter(entry.module for entry in entries)
    sizes = {module: sum(parameter.numel() for parameter in module.parameters()) for module in runs}
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module, (name, *_) in names.items():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners[parameter].append((module, f"{name}.{key}".lstrip(".")))
    # For each module that shares parameters with other modules: the names of these parameters in the other modules.
    tied: dict[nn.Module, dict[str, None]] = defaultdict(dict)
    for parameter_owners in owners.values():
        for module, _ in parameter_owners:
            tied[module] |= dict.fromkeys(name for owner, name in parameter_owners if owner is not module)
    run: Counter[nn.Module] = Counter()
    calls = []
    for entry, duration in zip(entries, seconds):
        module, start = entry.module, entry.start
        run[module] += 1
        name, *other_names = names[module]
        end = entry.end or start._replace(shapes=(), dtypes=())
        is_known = entry.end is not None and end.unknown == start.unknown
        call = Call(
            name=name, type=type(module).__name__, depth=entry.depth, parameters=sizes[module],
            inputs=start.shapes, outputs=end.shapes, dtypes=end.dtypes,
            multiply_adds=end.multiply_adds - start.multiply_adds if is_known else None,
            activation_bytes=end.bytes - start.bytes, seconds=duration, run=run[module], runs=runs[module],
            other_names=tuple(other_names), tied=tuple(tied[module]),
        )  # fmt: skip
        calls.append(call)
    return tuple(calls)


@dataclass(frozen=True)
class TracedModel:
    """A model, its arguments, and all names of each module that can have hooks."""

    model: nn.Module
    names: Mapping[nn.Module, Sequence[str]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class CallSnapshot(NamedTuple):
    """The shapes and dtypes of a call's input or output, and the pass's counters at the start or end of the call."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    multiply_adds: int
    unknown: int
    bytes: int


def run_counted_pass(subject: TracedModel) -> CallLog:
    """Run one pass that records a `CallSnapshot` at the start and the end of each call.

    If the model raises an error, a note in the error names the layer.
    """
    with preserve_state(subject.model), torch.no_grad(), Hooks() as hooks:
        args, kwargs = map_tensors((subject.args, subject.kwargs), torch.clone)
        counter = MultiplyAdds()
        storages = Storages([*subject.model.parameters(), *subject.model.buffers(), *list_tensors((args, kwargs))])

        def take_snapshot(value: Any) -> CallSnapshot:
            values = list_tensors(value)
            dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in values)
            return CallSnapshot(tuple(map(_shape, values)), dtypes, counter.total, counter.unknown, storages.total)

        def take_output_snapshot(output: Any) -> CallSnapshot:
            storages.add(output)
            return take_snapshot(output)

        log = CallLog(hooks, subject.names, take_snapshot, take_output_snapshot)
        try:
            with counter:
                subject.model(*args, **kwargs)
        except Exception as error:
            if len(log.open) > 1 and hasattr(error, "add_note"):  # `add_note` exists since Python 3.11.
                entry = log.open[-1]
                shapes = ", ".join(map(str, entry.start.shapes)) if entry.start is not None else "something odd"
                name, kind = subject.names[entry.module][0], type(entry.module).__name__
                error.add_note(f"In layer '{name}', {kind}, with input {shapes}.")
            raise
    return log


def run_timed_pass(subject: TracedModel, clock: Clock) -> tuple[CallLog, list[float]]:
    """Run one pass, and return its calls and the seconds of each call; NaN if the call raised an exception."""
    with preserve_state(subject.model), torch.no_grad(), Hooks() as hooks:
        args, kwargs = map_tensors((subject.args, subject.kwargs), torch.clone)
        log = CallLog(hooks, subject.names, lambda _: clock.read(), lambda _: clock.read())
        subject.model(*args, **kwargs)
    clock.wait()
    return log, [nan if entry.end is None else clock.between(entry.start, entry.end) for entry in log.entries]


def _shape(tensor: Tensor) -> Shape:
    if not tensor.is_nested:
        return tuple(tensor.shape)
    lengths: list[Any] = [-1] * tensor.ndim
    for axis in range(tensor.ndim):
        with contextlib.suppress(RuntimeError):
            lengths[axis] = tensor.size(axis)
    return tuple(length if isinstance(length, int) else -1 for length in lengths)


class CallLog:
    """Records the calls of modules in one pass. `entries` has all calls in order of start, `open` the running calls.

    For each call, the results of `begin((args, kwargs))` and `end(output)` are recorded. `begin` is the last function
    before the call, and `end` is the first function after the call, so that a clock measures only the call.
    """

    def __init__(
        self, hooks: Hooks, modules: Iterable[nn.Module], begin: Callable[[Any], Any], end: Callable[[Any], Any]
    ) -> None:
        self.entries: list[TraceEntry] = []
        self.open: list[TraceEntry] = []

        def on_start(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            entry = TraceEntry(module, self.open[-1] if self.open else None)
            self.entries.append(entry)
            self.open.append(entry)
            entry.start = begin((args, kwargs))

        def on_end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            snapshot = end(output)
            while self.open:
                entry = self.open.pop()
                # An entry of another module belongs to an inner call that raised an exception. The model caught the
                # exception.
                if entry.module is module:
                    entry.end = snapshot
                    return

        for module in modules:
            hooks.before_forward(module, on_start)
            hooks.after_forward(module, on_end)

    @property
    def order(self) -> list[tuple[nn.Module, int, bool]]:
        """Return the module and the depth of each call, and whether the call raised an exception.

        Two passes agree if these lists are equal.
        """
        return [(entry.module, entry.depth, entry.end is None) for entry in self.entries]


@dataclass
class TraceEntry:
    """A call, its parent (the call that contains it), and the records of its start and end.

    `end` is None if the call raised an exception.
    """

    module: nn.Module
    parent: TraceEntry | None
    start: Any = None
    end: Any = None

    @property
    def depth(self) -> int:
        """Return the number of calls that contain this call.

        If a parent raised an exception, its end is unknown, so this call may have started after the parent's end. Such
        a parent counts only if this call's module is one of its submodules.
        """
        depth, parent = 0, self.parent
        while parent is not None:
            depth += parent.end is not None or any(part is self.module for part in parent.module.modules())
            parent = parent.parent
        return depth
