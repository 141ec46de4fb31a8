"""What a step of a recorded training left: activations and gradients of each run of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from torch import Tensor

from gradcam.errors import LayerError, join_names, nearest, shorten
from gradcam.inspection.statistics import Statistics, measure, to_statistics
from gradcam.inspection.storage import ACTIVATION, GRADIENT, Key, Store

Value = TypeVar("Value", bound="Tensor | Statistics")


class Readings(Mapping["str | tuple[str, int]", Value]):
    """Values of a step by layer: `readings["layer4"]`, and `readings["layer4", 1]` where it ran a second time.

    Raises `LayerError` for a layer that has no value here, and says why.
    """

    def __init__(self, values: Mapping[Key, Any], kind: str, step: Step[Value]) -> None:
        self._values: dict[Key, Value] = {key: value for key, value in values.items() if key.kind == kind}
        self._ran = {key.layer: 1 + key.run for key in values if key.kind == ACTIVATION}
        self._kind, self._step = kind, step

    def __getitem__(self, layer: str | tuple[str, int]) -> Value:
        key = self._key(layer)
        if key not in self._values:
            raise LayerError(self._explain(key))
        return self._values[key]

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

    def _explain(self, key: Key) -> str:
        """Why there is no such value."""
        number = self._step.number
        if key.layer not in self._step.layers:
            offers = nearest(str(key.layer), self._step.layers) or self._step.layers[:3]
            return f"Layer {shorten(key.layer)} is not recorded. Nearest: {join_names(offers)}."
        runs = self._ran.get(key.layer, 0)
        if key.run >= runs:
            return f"Layer '{key.layer}' ran {runs} times in step {number}: there is no run {key.run}, counted from 0."
        if not self._step.is_differentiable:
            return f"Step {number} was a pass without gradients (torch.no_grad() or alike): it has activations alone."
        return (
            f"No gradient has come to layer '{key.layer}' in step {number}: call backward() inside the context. None comes "
            "to a layer that the loss does not depend on, nor where neither it nor anything before it is trained."
        )


class Step(Generic[Value]):
    """One recorded run of the model.

    `number`: counted from 0, with the runs that were not recorded. `layers`: the names of all that are recorded.
    `is_differentiable`: whether the model ran with gradients.
    """

    def __init__(self, number: int, layers: Sequence[str], store: Store, *, is_differentiable: bool) -> None:
        self.number = number
        self.layers = layers
        self.is_differentiable = is_differentiable
        self.store = store
        self._runs: dict[str, int] = {}

    @property
    def activations(self) -> Readings[Value]:
        """What the layers gave, by name."""
        return Readings(self.store.read(), ACTIVATION, self)

    @property
    def gradients(self) -> Readings[Value]:
        """The gradients with respect to what the layers gave, by name."""
        return Readings(self.store.read(), GRADIENT, self)

    def add_run(self, layer: str, activations: Tensor) -> Callable[[Tensor], None]:
        """Keep a run's activations; gives what keeps its gradient."""
        run = self._runs.get(layer, 0)
        self._runs[layer] = run + 1
        self.store.add(Key(layer, run, ACTIVATION), activations)
        return lambda gradient: self.store.add(Key(layer, run, GRADIENT), gradient)

    def rows(self) -> Iterator[dict[str, Any]]:
        """A flat dict of each value's statistics, the activations in order of execution first."""
        values: dict[Key, Any] = dict(self.store.read())
        for key, value in sorted(values.items(), key=lambda item: item[0].kind == GRADIENT):
            found = value if isinstance(value, Statistics) else to_statistics(value.numel(), measure(value))
            yield {"step": self.number, **key._asdict(), **asdict(found)}
