"""Every layer of a model: what it gives, how coarse that is, and whether a class activation map can be taken there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.dependence import Edge, Ways, edge_of, is_activated
from gradcam.errors import ImageError, shorten
from gradcam.hooks import Hooks
from gradcam.isolation import undisturbed
from gradcam.layers import layers_with_grid, unwrap
from gradcam.nested import first_floating, map_tensors, tensors
from gradcam.patches import find_patches
from gradcam.recording import Batch, caller_keeps, to_batch
from gradcam.suggestion import Place, no_graph_kept, read_scores, suggest, to_place
from gradcam.tokens import Layout, find_layout


@dataclass(frozen=True)
class LayerRow:
    """One layer.

    `type`: its class. `shape`: its output's, the first floating tensor's where there are several; None where there is none.
    `grid`: (h,w) or (d,h,w) of that on the picture, and `stride`, the picture's size over the grid's; None without a grid.
    `parameters`: how many numbers, its parts' included. `cam`: whether a class activation map can be taken there, and
    `reason`, why not. `is_suggested`: it is what `gradcam.explain` takes where no layer is named. `both_signs`: a map can be
    taken, of values that may be negative, since no activation such as ReLU comes last. `suggested_for_positive`: it is
    what `gradcam.explain` takes for methods that assume activations that are not negative, where that is another layer.
    """

    name: str
    type: str
    shape: tuple[int, ...] | None
    grid: tuple[int, ...] | None
    stride: tuple[float, ...] | None
    parameters: int
    cam: bool
    reason: str | None
    is_suggested: bool
    both_signs: bool = field(default=False, compare=False)
    suggested_for_positive: bool = field(default=False, compare=False)


def list_layers(model: nn.Module, images: Any = 224) -> tuple[LayerRow, ...]:
    """All layers of `model`, in the order of `model.named_modules()`: one row for each, from one forward pass.

    `images`: what the model takes, as in `gradcam.explain`; their values do not matter. Or the side of a square RGB picture
    in pixels, or its (height, width). On the meta device a model needs no weights, and nothing is computed. Any other is
    run, in evaluation mode, and left as it was.

    The suggestion is the layer that `gradcam.explain` takes by itself: see there. It is read off autograd's graph: a
    gradient that is zero by its value, as behind a head of zeros, is not seen there.

    Raises `ModelError` for what is no module, `ImageError` for images that are none. Errors of the model itself come
    through as they are; one may be that it does not run on the meta device.
    """
    model = unwrap(model)
    batch = to_batch(_to_images(model, images))
    look = _Look(model, batch)
    with undisturbed(model), no_graph_kept(model), Hooks() as hooks:
        look.watch(model, hooks)
        with_grid = layers_with_grid(model, batch.args, batch.kwargs, batch.images, batch.size)
    ways = Ways(look.scores, look.pictures, look.find_layout)
    layers = {name: module for name, module in model.named_modules() if name}
    reasons = {name: look.why_not(module, ways.depends) for name, module in layers.items()}
    found = [name for name in with_grid if reasons.get(name, "") is None]
    suggested = suggest(found, look.places(model), ways, look.output) if found else None
    first, positive = (None, None) if suggested is None else (suggested.layers[0], suggested.behind_activation)
    return tuple(
        replace(
            look.row(name, layers[name], reason),
            is_suggested=name == first,
            suggested_for_positive=name == positive != first,
        )
        for name, reason in reasons.items()
    )


def _to_images(model: nn.Module, images: Any) -> Any:
    """Images of the size, if that is what was given; on the meta device if the model is."""
    some = next(chain(model.parameters(), model.buffers()), torch.empty(0, dtype=torch.float32, device="cpu"))
    size = (images, images) if isinstance(images, int) else images
    if isinstance(size, tuple) and all(isinstance(side, int) for side in size):
        if len(size) != 2 or min(size) < 1:
            raise ImageError(
                f"The images are {shorten(images)}, expected a tensor, or a size: 224, or (height, width)."
            )
        dtype = some.dtype if some.is_floating_point() else torch.float32
        return torch.zeros(1, 3, *size, dtype=dtype, device=some.device)
    return map_tensors(images, lambda tensor: tensor.to("meta")) if some.is_meta else images


@dataclass(frozen=True)
class _Output:
    """What a layer gave: its shape, how that lies on the picture, where it is in the graph."""

    shape: tuple[int, ...]
    layout: Layout | None
    place: Place


class _Look:
    """What is seen of a model's layers while it runs."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self._batch = batch
        self._patches = find_patches(model.modules())
        self._runs: dict[nn.Module, int] = {}
        self._outputs: dict[nn.Module, _Output] = {}
        self.scores: list[Tensor] = []
        self.output: Any = None
        self.pictures: Edge | None = None

    def watch(self, model: nn.Module, hooks: Hooks) -> None:
        """Look at the model and all its layers, whenever it runs next; its pass is recorded, for the graph."""
        hooks.before_forward(model, self._record)
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.after_forward(module, self._keep_scores if module is model else self._keep)

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The pass is run without recording, and goes back to that when it ends."""
        torch.set_grad_enabled(True)
        copies = {tensor: _differentiable(tensor) for tensor in tensors((args, kwargs))}
        self.pictures = edge_of(copies.get(self._batch.pictures, self._batch.pictures))
        return map_tensors((args, kwargs), copies.__getitem__)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._runs[module] = self._runs.get(module, 0) + 1
        tensor = first_floating(output)
        if tensor is not None:
            layout = self.find_layout(tensor.shape, module)
            self._outputs[module] = _Output(tuple(tensor.shape), layout, to_place(tensor, layout, self._batch.size))

    def _keep_scores(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.scores, self.output = read_scores(None, output, self._batch.images), output

    def places(self, model: nn.Module) -> dict[str, Place]:
        """Where the layers' outputs are, by name."""
        modules = {
            name: module for name, module in model.named_modules(remove_duplicate=False) if module in self._outputs
        }
        return {name: self._outputs[module].place for name, module in modules.items()}

    def find_layout(self, shape: Sequence[int], module: nn.Module | None = None) -> Layout | None:
        """How an output of this shape lies on the pictures."""
        batch = self._batch
        return find_layout(shape, batch.size, module, batch.images, patches=self._patches)

    def why_not(self, module: nn.Module, depends: Mapping[Edge, bool]) -> str | None:
        """Why no class activation map can be taken at this layer; None where it can."""
        if isinstance(module, torch.jit.ScriptModule):
            return "TorchScript"
        runs, output = self._runs.get(module, 0), self._outputs.get(module)
        if runs != 1:
            return f"runs {runs} times" if runs else self._why_unseen(module)
        if output is None:
            return "gives no floating-point tensor"
        if output.layout is None:
            is_folded = len(output.shape) > 2 and output.shape[0] != self._batch.images
            return "its rows are not the images" if is_folded else "no grid"
        edge = output.place.edge
        if edge is None or edge not in depends:
            return "the score does not depend on it"
        return None if depends[edge] else "only the class token reaches the score"

    def _why_unseen(self, module: nn.Module) -> str:
        parts_ran = any(part in self._runs for part in module.modules())
        return "not called itself, only its parts" if parts_ran else "not called in evaluation mode"

    def row(self, name: str, module: nn.Module, reason: str | None) -> LayerRow:
        """What there is to say about one layer, but for the suggestions."""
        output = self._outputs.get(module)
        edge = None if output is None else output.place.edge
        layout = None if output is None else output.layout
        return LayerRow(
            name=name,
            type=type(module).__name__,
            shape=None if output is None else output.shape,
            grid=None if layout is None else layout.grid,
            stride=None if layout is None else _stride(self._batch.size, layout.grid),
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            cam=reason is None,
            reason=reason,
            is_suggested=False,
            both_signs=reason is None and edge is not None and not is_activated(edge),
        )


def _differentiable(tensor: Tensor) -> Tensor:
    """A copy that may be changed in place, and that requires gradients, so that frozen models are recorded too."""
    return caller_keeps(tensor).requires_grad_().clone() if tensor.is_floating_point() else tensor.clone()


def _stride(size: Sequence[int], grid: Sequence[int]) -> tuple[float, ...]:
    """Whole numbers stay whole."""
    return tuple(length // cells if length % cells == 0 else length / cells for length, cells in zip(size, grid))
