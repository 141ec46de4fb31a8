"""How a score's gradient flows back through a network: at what its layers give, and at their parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.arguments import caller_keeps, to_batch
from gradcam.errors import LayerError, ModelError, join_names
from gradcam.failures import IN_A_MODEL, known_failures
from gradcam.hooks import Hooks
from gradcam.inspection.observation import Observation
from gradcam.inspection.parameters import Aliases
from gradcam.inspection.selection import Layers, select_layers
from gradcam.inspection.verdicts import LayerGradients, judge
from gradcam.isolation import undisturbed
from gradcam.layers import unwrap
from gradcam.nested import map_tensors
from gradcam.recording import caller_autocast, has_float16
from gradcam.targets import compute_scores


@dataclass(frozen=True, eq=False)
class GradientFlow:
    """The gradients of a score at each layer of a network, in order of execution.

    `layers`: a `LayerGradients` for each, the first to finish first. `reference`: the norm of the gradient at the model's
    output, which verdicts compare with. `model`: its class. `classes`: int64 (N,K),
    None where the target was a function. `scores`: float32 (N,K), of whose sum these are the gradients.
    """

    layers: tuple[LayerGradients, ...]
    reference: float
    model: str
    classes: Tensor | None
    scores: Tensor

    def __repr__(self) -> str:
        verdicts = [layer.verdict for layer in self.layers]
        told = [f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts) if verdict is not None]
        return (
            f"{type(self).__name__}({self.model}, {len(self.layers)} layer(s), {len(self.scores)} image(s), "
            f"{', '.join(told) or 'nothing conspicuous'})"
        )

    def rows(self) -> list[dict[str, Any]]:
        """A flat dict for each layer's output and each of its parameters, as `pandas.DataFrame` takes them."""
        return [row for layer in self.layers for row in layer.rows()]


def gradients(model: nn.Module, images: Any, *, target: Any = None, layers: Layers | None = None) -> GradientFlow:
    """Statistics of a score's gradients with respect to what each layer gives, and to its parameters.

    `images`, `target`: as in `gradcam.explain`. The gradient is that of the sum of all scores (N,K): for one image and
    one class, of that class's logit. `layers`: names, patterns (`layer*.conv1`), modules, or several. None takes all that
    ran and have no parts, or have parameters of their own, without those that hand on their input as it came.
    Of a layer that runs several times all runs together are one row.

    Frozen parameters have their gradients as well, except where TorchScript or a custom `autograd.Function` is given one.
    In float16 gradients are scaled on their way, so that small ones are not lost. Verdicts are as in `judge`.
    The model is run in evaluation mode, eagerly, and left as it was, `.grad` included; several threads may do so at once.

    Raises `LayerError` for a layer that does not exist, never runs, or gives no floating tensor, and where a pattern fits
    none that does; `ModelError` where no recorded operation leads to the score; `TargetError` and `ImageError` as
    `gradcam.explain` does.
    """
    model, batch = unwrap(model), to_batch(images)
    seen = Observation(_choose(model, layers))
    with undisturbed(model) as modules, torch.enable_grad(), known_failures(IN_A_MODEL), Hooks() as hooks:
        leaves, (args, kwargs) = _to_leaves((batch.args, batch.kwargs))
        aliases = Aliases(model.parameters(), seen.note_use)
        seen.follow(hooks)
        with aliases:
            output = seen.follow_output(model(*args, **kwargs), hooks)
            scored = compute_scores(target, output, batch.images)
        if not scored.values.requires_grad:
            raise _no_gradient()
        device = scored.values.device.type
        is_scaled = caller_autocast(device) == torch.float16 or has_float16((args, kwargs, output), modules)
        with torch.autocast(device, enabled=False):
            seen.differentiate(scored.values.sum(), aliases, leaves, is_scaled=is_scaled)
        found = [seen.describe(name) for name in _names(model, layers, seen)]
    return GradientFlow(
        layers=judge(found, seen.reference()),
        reference=seen.reference(),
        model=type(model).__name__,
        classes=None if scored.classes is None else scored.classes.to(batch.device),
        scores=scored.values.detach().float().to(batch.device),
    )


def _choose(model: nn.Module, layers: Layers | None) -> dict[str, nn.Module]:
    if layers is not None:
        return select_layers(model, layers)
    return {
        name: it
        for name, it in model.named_modules()
        if not it._modules or any(True for _ in it.parameters(recurse=False))
    }


def _to_leaves(values: Any) -> tuple[list[Tensor], Any]:
    """Leaves for the floating tensors of the caller's, and the arguments with copies of these, to be changed in place."""
    leaves: list[Tensor] = []

    def to_leaf(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        leaves.append(caller_keeps(tensor).detach().requires_grad_())
        return leaves[-1].clone()

    arguments = map_tensors(values, to_leaf)
    return leaves, arguments


def _names(model: nn.Module, layers: Layers | None, seen: Observation) -> list[str]:
    """The layers to tell of, in order of execution. Raises `LayerError` for one that was asked for and has no gradients."""
    names = seen.seen()
    if layers is None:
        return [name for name in names if name not in seen.left_out]
    for each in [layers] if isinstance(layers, (str, nn.Module)) else layers:
        chosen = select_layers(model, each)
        if not any(name in names for name in chosen):
            raise LayerError(
                f"{_say(chosen)} did not run: choose a layer on the way from the input to the score. "
                "(Hooks are skipped in modules whose forward() is called directly.)"
            )
        if all(name in seen.silent for name in chosen if name in names):
            raise LayerError(f"{_say(chosen)} gave no floating-point tensor: choose a layer whose output is one.")
    return [name for name in names if name not in seen.silent]


def _say(names: Iterable[str]) -> str:
    return f"Layer {join_names(list(names)[:3])}"


def _no_gradient() -> ModelError:
    return ModelError(
        "The score does not depend on the images or on any parameter: no recorded operation leads from them to it. The "
        "model switches recording off (torch.no_grad in a forward method), detaches a value, or passes through an operation "
        "without a derivative (argmax, rounding, 8-bit layers): take that away, or choose another score."
    )
