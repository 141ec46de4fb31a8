"""The forward passes of a trace: one in which everything is noted but the time, and others in which only the time is."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.hooks import Hooks
from gradcam.inspection.calls import CallLog
from gradcam.inspection.clocks import find_clock
from gradcam.inspection.multiply_adds import MultiplyAdds
from gradcam.inspection.storages import Storages
from gradcam.isolation import undisturbed
from gradcam.nested import map_tensors, tensors

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Subject:
    """What is run: a model, its modules that can be watched by their names, and its arguments."""

    model: nn.Module
    names: dict[nn.Module, list[str]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Counts:
    """What had been counted at some moment of a pass."""

    multiply_adds: int
    unknown: int
    bytes: int


@dataclass(frozen=True)
class Seen:
    """What went into a call, or came out of it, and what had been counted then."""

    shapes: Shapes
    dtypes: tuple[str, ...]
    counts: Counts


def count_pass(subject: Subject) -> CallLog:
    """One pass whose calls have a `Seen` for `begun` and for `ended`.

    What the model raises comes through, with a note of the layer in which it arose where Python has notes.
    """
    with _prepared(subject) as (args, kwargs, hooks):
        counter = MultiplyAdds()
        storages = Storages([*_own(subject.model), *tensors((args, kwargs))])

        def look(value: Any) -> Seen:
            found = list(tensors(value))
            dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in found)
            counts = Counts(counter.total, counter.unknown, storages.total)
            return Seen(tuple(map(_shape, found)), dtypes, counts)

        def look_at_output(output: Any) -> Seen:
            storages.add(output)
            return look(output)

        log = CallLog(lambda args, kwargs: look((args, kwargs)), look_at_output)
        log.watch(hooks, subject.names)
        with counter, _saying_where(log, subject):
            subject.model(*args, **kwargs)
    return log


def timed_pass(subject: Subject, devices: Collection[torch.device]) -> tuple[CallLog, list[float]]:
    """One pass, and the seconds of each of its calls that ended; others have NaN."""
    clock = find_clock(devices)
    log = CallLog(lambda args, kwargs: clock.read(), lambda output: clock.read())
    with _prepared(subject) as (args, kwargs, hooks):
        log.watch(hooks, subject.names)
        subject.model(*args, **kwargs)
    clock.wait()
    nan = float("nan")
    return log, [nan if it.ended is None else clock.between(it.begun, it.ended) for it in log.entries]


@contextlib.contextmanager
def _prepared(subject: Subject) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Hooks]]:
    """Arguments that the model may change, and hooks: each pass finds the same random state, buffers and values."""
    with undisturbed(subject.model), torch.no_grad(), Hooks() as hooks:
        args, kwargs = map_tensors((subject.args, subject.kwargs), torch.clone)
        yield args, kwargs, hooks


def _shape(tensor: Tensor) -> tuple[int, ...]:
    if not tensor.is_nested:
        return tuple(tensor.shape)
    return tuple(_length(tensor, axis) for axis in range(tensor.ndim))


def _length(tensor: Tensor, axis: int) -> int:
    """-1 where the parts of a nested tensor differ in it."""
    try:
        length = tensor.size(axis)
    except RuntimeError:
        return -1
    return length if isinstance(length, int) else -1


def _own(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


@contextlib.contextmanager
def _saying_where(log: CallLog, subject: Subject) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if len(log.open) > 1 and hasattr(error, "add_note"):  # from Python 3.11 on
            entry = log.open[-1]
            shapes = ", ".join(map(str, entry.begun.shapes)) if entry.begun is not None else "something odd"
            error.add_note(
                f"In layer '{subject.names[entry.module][0]}', {type(entry.module).__name__}, which got {shapes}."
            )
        raise
