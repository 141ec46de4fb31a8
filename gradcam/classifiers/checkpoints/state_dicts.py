"""Where in a checkpoint the weights lie: trainers put them under many names, beside much else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Averages of the weights over the training come first, as timm takes them: they are what such a training is judged by.
AVERAGES = ("state_dict_ema", "model_ema", "ema_state_dict", "model_ema_state_dict", "ema", "ema_model")
PLAIN = ("state_dict", "model_state_dict", "model", "net", "module", "network", "weights", "params")
DEEPEST = 3


@dataclass(frozen=True)
class StateDict:
    """Weights by name, and the keys under which they lie in the file: none where the file is nothing else."""

    keys: tuple[str, ...]
    values: Mapping[str, Any]

    @property
    def is_known(self) -> bool:
        """Whether they lie where trainers put a model's weights."""
        return all(key in AVERAGES + PLAIN for key in self.keys)


def find_state_dicts(content: object, is_tensor: Callable[[object], bool]) -> Sequence[StateDict]:
    """The state dicts in what a file holds, the best first: averages, then under the usual names, then any others."""
    inside = sorted(_inside(content, is_tensor, DEEPEST), key=_rank)
    if not any(found.is_known for found in inside) and is_state_dict(content, is_tensor):
        return [StateDict((), content)]  # type: ignore[arg-type]  # is_state_dict says that it is a mapping
    return inside


def is_state_dict(content: object, is_tensor: Callable[[object], bool]) -> bool:
    """Whether this is a mapping from names to tensors, a few other things beside them allowed."""
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        return False
    return 2 * sum(is_tensor(value) for value in content.values()) > len(content)


def _inside(content: object, is_tensor: Callable[[object], bool], depth: int) -> Iterator[StateDict]:
    if not isinstance(content, Mapping) or depth == 0:
        return
    for name, value in content.items():
        if is_state_dict(value, is_tensor) and isinstance(name, str):
            yield StateDict((name,), value)
        elif name in AVERAGES + PLAIN:
            for found in _inside(value, is_tensor, depth - 1):
                yield StateDict((name, *found.keys), found.values)


def _rank(found: StateDict) -> tuple[int, ...]:
    order = AVERAGES + PLAIN
    return tuple(order.index(key) if key in order else len(order) for key in found.keys)
