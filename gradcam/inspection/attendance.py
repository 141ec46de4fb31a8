"""Whether layers that were asked for took part in what a user ran."""

from __future__ import annotations

import torch
from torch import nn

from gradcam.errors import GradientError, LayerError, join_names
from gradcam.inspection.selection import Layers, select_layers


class Attendance:
    """Which layers ran, and which could ever get a gradient, by what was asked for: of a pattern's layers one is enough."""

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        wanted = [layers] if isinstance(layers, (str, nn.Module)) else layers
        self._wanted = [(layer, set(select_layers(model, layer))) for layer in wanted]
        self._has_model_run = False
        self._ran: set[str] = set()
        self._recorded: set[str] = set()  # ran while PyTorch recorded
        self._differentiable: set[str] = set()

    def note_run(self, name: str) -> None:
        """A layer ran."""
        self._ran.add(name)
        if torch.is_grad_enabled():
            self._recorded.add(name)

    def note_gradient(self, name: str) -> None:
        """A layer gave something that requires a gradient."""
        self._differentiable.add(name)

    def note_model(self) -> None:
        """The whole model ran."""
        self._has_model_run = True

    def require_runs(self) -> None:
        """Raises `LayerError` for what never ran although the model did."""
        for layer, names in self._wanted:
            if self._has_model_run and not names & self._ran:
                which, never = _describe(layer, names), "never ran" if len(names) == 1 else "ever ran"
                raise LayerError(
                    f"{which} {never}, although the model did: choose one that its forward calls as a module, layer(x), "
                    "not one whose parts or parameters it uses by itself, or that runs in other threads."
                )

    def require_gradients(self) -> None:
        """Raises `GradientError` for what ran, and no gradient can reach."""
        for layer, names in self._wanted:
            if names & self._recorded and not names & self._differentiable:
                which, gave = _describe(layer, names), "gave nothing" if len(names) == 1 else "gave anything"
                raise GradientError(
                    f"{which} {gave} that requires a gradient, so that none came to be edited: call requires_grad_() on the "
                    "input, or on parameters up to there."
                )


def _describe(layer: str | nn.Module, names: set[str]) -> str:
    return f"Layer {join_names(names)}" if len(names) == 1 else f"None of the {len(names)} layers of '{layer}'"
