"""Which attentions a model has, and within which of its modules they are computed: seen in a plain forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.attention.interception import Interception
from gradcam.hooks import Hooks
from gradcam.nested import first_floating


@dataclass(frozen=True)
class Sighting:
    """One attention: its shape (rows,...,queries,keys), and the modules that were running, the outermost first."""

    shape: tuple[int, ...]
    running: tuple[str, ...]

    @property
    def queries(self) -> int:
        """How many things attend."""
        return self.shape[-2]

    @property
    def keys(self) -> int:
        """How many things they attend to."""
        return self.shape[-1]


@dataclass(frozen=True)
class Census:
    """All attentions of one pass in their order, and the output's shape of each module around one that gave a tensor."""

    sightings: list[Sighting] = field(default_factory=list)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @contextlib.contextmanager
    def taken(self, model: nn.Module) -> Iterator[None]:
        """Around one run of the model, of which nothing is changed."""
        names = {module: name for name, module in model.named_modules()}
        running: list[tuple[str, int]] = []  # with the number of sightings at the start

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            running.append((names[module], len(self.sightings)))

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            name, count = running.pop()
            while name != names[module]:  # left by an exception that the model caught
                name, count = running.pop()
            tensor: Tensor | None = first_floating(output)
            if tensor is not None and len(self.sightings) > count:
                self.outputs[name] = tuple(tensor.shape)

        def see(shape: tuple[int, ...]) -> None:
            self.sightings.append(Sighting(shape, tuple(name for name, _ in running)))

        with Hooks() as hooks, Interception(see):
            for module in names:
                if not isinstance(module, torch.jit.ScriptModule):
                    hooks.before_forward(module, enter)
                    hooks.after_forward(module, leave)
            yield
