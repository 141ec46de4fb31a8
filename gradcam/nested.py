"""Tensors inside tuples, lists, mappings and dataclasses, as models take and return them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`, in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        for _, child in _children(value):
            yield from tensors(child)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function` applied to every tensor; containers are copied, everything else is kept as it is."""
    if isinstance(value, Tensor):
        return function(value)
    changed = {key: map_tensors(child, function) for key, child in _children(value)}
    return _with_children(value, changed) if changed else value


def replace_tensor(value: Any, old: Tensor, new: Tensor) -> Any:
    """`value` with the tensor `old` replaced by `new` wherever it lies."""
    return map_tensors(value, lambda tensor: new if tensor is old else tensor)


def first_floating(value: Any) -> Tensor | None:
    """The first floating-point tensor in `value`, or None."""
    return next((tensor for tensor in tensors(value) if tensor.is_floating_point()), None)


def floating_by_keys(value: Any) -> dict[tuple[str, ...], Tensor]:
    """Every floating-point tensor in `value`, once, by the keys and indices that lead to it."""
    if isinstance(value, Tensor):
        return {(): value} if value.is_floating_point() else {}
    found: dict[int, tuple[tuple[str, ...], Tensor]] = {}
    for key, child in _children(value):
        for keys, tensor in floating_by_keys(child).items():
            found.setdefault(id(tensor), ((str(key), *keys), tensor))
    return dict(found.values())


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(
        value, Mapping
    ):  # before dataclasses: Hugging Face's ModelOutput is both, and a mapping leaves None out
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


def _with_children(value: Any, children: dict[Any, Any]) -> Any:
    if isinstance(value, tuple):
        values = children.values()
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    if isinstance(value, list):
        return list(children.values())
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return {**value, **children}
    changed = copy.copy(value)
    for key, child in children.items():
        if isinstance(changed, MutableMapping):
            changed[key] = child
        else:
            object.__setattr__(changed, key, child)  # frozen dataclasses too: the copy is ours
    return changed
