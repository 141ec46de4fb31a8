"""The whole computation, top to bottom: a model and images in, heatmaps out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import GradcamError, LayerError, ModelError
from gradcam.gradients import jacobian, no_dependence
from gradcam.heatmap import to_heatmaps
from gradcam.layers import find_layer, norm_before_last_attention, unwrap
from gradcam.methods import Method, find_method
from gradcam.nested import map_tensors
from gradcam.recording import Recorded, find_layers_with_grid, recorded_pass, to_batch
from gradcam.tokens import Layout, find_layout


@dataclass(frozen=True, eq=False)
class Explanation:
    """Where a model looked: K maps for each of N images.

    `maps`: float32 (N,K,h,w), what the method gave, negative values cut off, at the layer's resolution.
    `heatmaps`: float32 (N,K,H,W) in [0,1], at the input's size, each divided by its own maximum; a blank map stays zero.
    `classes`: int64 (N,K), None where the target was a function. `scores`: float32 (N,K), what was explained.
    `output`: the model's own, detached. `layer`: its dotted name. `method`: its name.
    Volumes have (d,h,w) and (D,H,W) in place of (h,w) and (H,W). Tensors are on the images' device.
    """

    maps: Tensor
    heatmaps: Tensor
    classes: Tensor | None
    scores: Tensor
    output: Any = field(repr=False)
    layer: str
    method: str

    def __repr__(self) -> str:
        images, classes = self.maps.shape[:2]
        grid, size = (" x ".join(map(str, tensor.shape[2:])) for tensor in (self.maps, self.heatmaps))
        return (
            f"{type(self).__name__}({images} image(s), {classes} map(s) each, {self.method} at {self.layer}, "
            f"{grid} to {size}, {self.maps.device})"
        )


def explain(
    model: nn.Module,
    images: Any,
    layer: str | nn.Module | None = None,
    *,
    method: str = "gradcam",
    target: Any = None,
) -> Explanation:
    """Show where `model` looked in `images`, in one forward pass and a backward pass through the tail of the network.

    `images`: what the model takes, usually a floating tensor (N,C,H,W) or (N,C,D,H,W), preprocessed. A tuple is passed as
    positional arguments, a dict as keyword arguments; N and the size are those of its first floating 4-D or 5-D tensor.
    `layer`: dotted name, or module. None takes the last layer that has a grid and that the score depends on, which costs
    one more forward pass of one image: name the layer in loops.
    `method`: a key of `gradcam.METHODS`.
    `target`: None for each image's top class, an int for all, N ints, an (N,K) nested sequence or tensor for K maps per
    image, a `targets.ClassTarget`, or a function from the model's output to scores (N,) or (N,K).

    The model is left as it was: hooks, training flags, `requires_grad`, `.grad`, grad mode, random state. It is explained
    in evaluation mode. Several threads may explain with one model at once; since a module's training flag is one for all
    threads, a training step that overlaps with an explanation runs in evaluation mode: take turns there.

    Raises `ModelError`, `LayerError`, `TargetError`, `ImageError`, all of them `GradcamError`: see each one's message.
    Errors of the model itself come through as they are.
    """
    if layer is None:
        return _explain_last_layer(model, images, method, target)
    ((_, explanation),) = compare(model, images, layers=[layer], methods=[method], target=target).items()
    return explanation


def compare(
    model: nn.Module,
    images: Any,
    *,
    layers: Sequence[str | nn.Module],
    methods: Sequence[str],
    target: Any = None,
) -> dict[tuple[str, str], Explanation]:
    """Explain at several layers with several methods, all from one forward and one backward pass.

    Gives a dict from (layer name, method name). Arguments and errors are as in `explain`.
    """
    model, batch = unwrap(model), to_batch(images)
    chosen = _find_layers(model, layers)
    found = _find_methods(methods)
    with recorded_pass(model, batch, chosen, target) as recorded:
        maps = _compute_maps(recorded, found)
        output = map_tensors(recorded.output, torch.Tensor.detach)
        return {
            (layer, method): Explanation(
                maps=values.to(batch.device),
                heatmaps=to_heatmaps(values, batch.size).to(batch.device),
                classes=None if recorded.classes is None else recorded.classes.to(batch.device),
                scores=recorded.scores.detach().float().to(batch.device),
                output=output,
                layer=layer,
                method=method,
            )
            for (layer, method), values in maps.items()
        }


def _explain_last_layer(model: nn.Module, images: Any, method: str, target: Any) -> Explanation:
    """Explain at the last layer that has a grid and, on it, a gradient."""
    last, *others = find_layers_with_grid(unwrap(model), to_batch(images))
    try:
        return explain(model, images, last, method=method, target=target)
    except LayerError:  # a dead end, such as the last block of a network that reads its class token only
        layer = _find_last_with_gradient(model, images, others, target)
        if layer is None:
            raise LayerError(
                "The gradient is exactly zero at every layer that has a grid: nothing there can change the score "
                "(weights of zero in the head, a probability that is exactly 0 or 1). Choose another score or class."
            ) from None
        return explain(model, images, layer, method=method, target=target)


def _find_last_with_gradient(model: nn.Module, images: Any, names: Sequence[str], target: Any) -> str | None:
    model, batch = unwrap(model), to_batch(images)
    with recorded_pass(model, batch, _find_layers(model, names), target) as recorded:
        with torch.enable_grad():
            total = recorded.scores.sum(1, keepdim=True)
        (gradients,) = jacobian(total, list(recorded.activations.values()), scaled=recorded.has_float16)
        for name, gradient in zip(names, gradients):
            if gradient is not None and _find_grid(name, gradient[0], recorded).to_grid(gradient[0]).any():
                return name
    return None


def _find_methods(names: Sequence[str]) -> list[Method]:
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise GradcamError(f"methods is {names!r}, expected a list of at least one name.")
    return [find_method(name) for name in names]


def _find_layers(model: nn.Module, chosen: Sequence[str | nn.Module]) -> dict[str, nn.Module]:
    if isinstance(chosen, str) or not isinstance(chosen, Sequence) or not chosen:
        raise LayerError(
            f"layers is {type(chosen).__name__}, expected a list of at least one layer, by name or as modules."
        )
    return dict(find_layer(model, layer) for layer in chosen)


def _compute_maps(recorded: Recorded, methods: Sequence[Method]) -> dict[tuple[str, str], Tensor]:
    """Maps (N,K,...) by layer and method: after ReLU, float32."""
    layouts = {layer: _find_grid(layer, tensor, recorded) for layer, tensor in recorded.activations.items()}
    for layer, tensor in recorded.activations.items():
        _range(tensor.detach(), f"The activations of layer '{layer}' are")
    grids = {
        layer: _at_least_float32(layouts[layer].to_grid(tensor.detach()))
        for layer, tensor in recorded.activations.items()
    }
    maps: dict[tuple[str, str], list[Tensor]] = {(layer, method.name): [] for layer in grids for method in methods}
    blind = set(grids)
    for gradients in jacobian(recorded.scores, list(recorded.activations.values()), scaled=recorded.has_float16):
        for layer, gradient in zip(grids, gradients):
            if gradient is None:
                raise no_dependence([layer])
            on_grid = layouts[layer].to_grid(gradient.flatten(0, 1))
            if _range(on_grid, f"The gradients at layer '{layer}' are") != (0, 0):
                blind.discard(layer)
            on_grid = _at_least_float32(on_grid).unflatten(0, gradient.shape[:2]).transpose(0, 1)
            for method in methods:
                maps[layer, method.name].append(method.compute(grids[layer], on_grid).relu().float())
    for layer in blind:
        raise _blind(layer, layouts[layer], recorded.model)
    joined = {key: torch.cat(parts, dim=1) for key, parts in maps.items()}
    for (layer, name), values in joined.items():
        _range(values, f"The {name} maps at layer '{layer}', in float32, are")
    return joined


def _find_grid(layer: str, activations: Tensor, recorded: Recorded) -> Layout:
    batch = recorded.batch
    layout = find_layout(activations.shape, batch.size, recorded.model.get_submodule(layer))
    if activations.shape[:1] != (batch.images,):
        raise LayerError(
            f"Layer '{layer}' gives {tuple(activations.shape)} for {batch.images} image(s): its rows are not the images, "
            "so that no map can be assigned to one. Choose a layer outside the part that folds the batch."
        )
    if layout is None:
        raise LayerError(
            f"Layer '{layer}' gives {tuple(activations.shape)} for images of {' x '.join(map(str, batch.size))}, in which "
            "there is no spatial grid: choose a layer before pooling and flattening."
        )
    return layout


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _range(tensor: Tensor, what: str) -> tuple[float, float]:
    """The least and the largest value. Raises `ModelError` where one is NaN or infinite: both pass through here."""
    lowest, highest = tensor.amin().item(), tensor.amax().item()
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        kind = "NaN" if math.isnan(lowest) else "infinite"
        hint = " float16 holds nothing above 65504: use bfloat16 or float32." if tensor.dtype == torch.float16 else ""
        raise ModelError(
            f"{what} {kind} in places: look for NaN and for huge values in the input and the weights.{hint}"
        )
    return lowest, highest


def _blind(layer: str, layout: Layout, model: nn.Module) -> LayerError:
    """The error for a layer whose gradient is exactly zero all over the grid."""
    norm = norm_before_last_attention(model) if layout.kind == "tokens" else None
    if norm:
        return LayerError(
            f"The gradient at layer '{layer}' is exactly zero on every patch: behind the last attention only the class "
            f"token reaches the score. Choose the norm before that attention, '{norm}', or a layer further up."
        )
    return LayerError(
        f"The gradient at layer '{layer}' is exactly zero: nothing there can change the score (a unit that is switched off, "
        "a probability that is exactly 0 or 1, a factor of zero). Choose another layer, or the logit for a score."
    )
