"""Every layer of a model: what it gives, how coarse that is, and whether a class activation map can be taken there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.cam.grid import are_shares, try_all
from gradcam.cam.places import MIN_ANSWERS, PlacedLayer, count_answers
from gradcam.cam.suggest import Place, no_graph_kept, read_scores, suggest, to_place
from gradcam.errors import ImageError, shorten, show_fields
from gradcam.hooks.autograd import Edge, edge_of, nodes_behind
from gradcam.hooks.hooks import Hooks
from gradcam.hooks.nested import Batch, caller_keeps, floating_by_keys, map_tensors, tensors, to_batch
from gradcam.hooks.preserve import preserve_state
from gradcam.hooks.pytorch import is_softmax
from gradcam.layers.find import Outlet, Ways, is_activated, layers_with_grid, unwrap
from gradcam.layers.layout import USUAL_DEPTH, Axes, Layout, find_layout, find_patches, is_guess, takes_volumes


@dataclass(frozen=True)
class LayerRow:
    """One layer. `type`: its class. `shape`: its output's, of several tensors that of the explained one; None where
    there is none. `grid`: (h,w) or (d,h,w) of that on the picture, and `stride`, the picture's size over the grid's;
    None without a grid. `parameters`: how many numbers, its parts' included. `cam`: whether a class activation map can
    be taken there, and `reason`, why not. `is_suggested`: it is what `gradcam.explain` takes where no layer is named.
    `both_signs`: a map can be taken, of values that may be negative, since no activation such as ReLU comes last.
    `suggested_for_positive`: it is what `gradcam.explain` takes for methods that assume activations that are not
    negative, where that is another layer. `places`: at how many of six changed places of the picture its cells answer,
    where it is `guessed` how they lie; below 4 they lie elsewhere. None where it is none, or nothing can be seen, as on
    the meta device."""

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
    guessed: bool = field(default=False, compare=False)
    places: int | None = field(default=None, compare=False)

    __repr__ = show_fields

    @property
    def is_out_of_place(self) -> bool:
        """Whether its cells were seen to lie elsewhere than they are drawn."""
        return self.places is not None and self.places < MIN_ANSWERS


def list_layers(model: nn.Module, images: Any = 224) -> tuple[LayerRow, ...]:
    """List all layers of a model, and which of them can be a target layer, from one forward pass.

    If the layout of some layers is ambiguous, seven more passes measure whether their cells respond in the right place.
    The model runs in evaluation mode, and is left unchanged.

    Parameters
    ----------
    model : nn.Module
        Any model. On the meta device it needs no weights, and nothing is computed.
    images : int, tuple, Tensor or dict, default 224
        The size of an RGB image in pixels: the side of a square, or (height, width). For models of volumes or video
        clips, it is (depth, height, width); the default depth is 16. You can also pass a model input, as in `explain`;
        the values of the input do not matter.

    Returns
    -------
    tuple of LayerRow
        One row per layer, in the order of `model.named_modules()`. The fields are `name`, `type`, `shape`, `grid`,
        `stride`, `parameters`, `cam` (True if the layer can be a target layer), `reason` (why it cannot be one),
        `is_suggested` (the default layer of `explain`), `both_signs`, `places`. If the default layer runs several
        times, it also has a row for its last run: "layer4.1.relu#1".

    Raises
    ------
    ModelError
        If `model` is not a module.
    ImageError
        If `images` is not a valid input. Errors of the model itself are passed on unchanged.

    Notes
    -----
    The default layer is found from autograd's graph alone. Gradients that are computed but happen to be zero, such as
    those before a head with zero weights, are not detected.

    Examples
    --------
    >>> import gradcam, torchvision
    >>> rows = gradcam.list_layers(torchvision.models.resnet18(weights=None))
    >>> [(row.name, row.grid) for row in rows if row.is_suggested]
    [('layer4', (7, 7))]
    """
    model = unwrap(model)
    batch = to_batch(_to_images(model, images))
    look = _Look(model, batch)
    with preserve_state(model), no_graph_kept(model, lambda: look.pictures), Hooks() as hooks:
        look.watch(model, hooks)
        with_grid = layers_with_grid(model, batch)
    look.settle()
    ways = Ways(look.scores, look.pictures, look.find_layout)
    look.choose(ways.depends)
    layers = {name: module for name, module in model.named_modules() if name}
    reasons = {name: look.why_not(module, ways.depends) for name, module in layers.items()}
    guesses = look.find_guesses({name: module for name, module in layers.items() if reasons[name] is None})
    places = {} if batch.pictures.is_meta or not guesses else count_answers(model, batch, guesses)
    last_runs = {name: layers[name.rpartition("#")[0]] for name in with_grid if name not in layers}
    reasons |= {name: look.why_not(module, ways.depends, run=True) for name, module in last_runs.items()}
    found = [name for name in with_grid if reasons[name] is None]
    suggested = suggest(found, look.places(model), ways, look.output) if found else None
    first, positive = (None, None) if suggested is None else (suggested.layers[0], suggested.behind_activation)
    order = [each for name in layers for each in (name, *(run for run in last_runs if run.rpartition("#")[0] == name))]
    return tuple(
        replace(
            look.row(name, (layers | last_runs)[name], reasons[name]),
            is_suggested=name == first,
            suggested_for_positive=name == positive != first,
            guessed=name in guesses,
            places=places.get(name),
        )
        for name in order
        if name in layers or name in (first, positive)
    )


def _to_images(model: nn.Module, images: Any) -> Any:
    some = next(chain(model.parameters(), model.buffers()), torch.empty(0, dtype=torch.float32, device="cpu"))
    size = (images, images) if isinstance(images, int) else images
    if isinstance(size, tuple) and all(isinstance(side, int) for side in size):
        ranks = (2, 3) if takes_volumes(model) else (2,)
        if len(size) not in ranks or min(size) < 1:
            raise ImageError(
                f"The images are {shorten(images)}, expected a tensor, or a size: 224, (height, width), or "
                "(depth, height, width) for volumes."
            )
        if len(size) < max(ranks):
            size = (USUAL_DEPTH, *size)
        dtype = some.dtype if some.is_floating_point() else torch.float32
        return torch.zeros(1, 3, *size, dtype=dtype, device=some.device)
    return map_tensors(images, lambda tensor: tensor.to("meta")) if some.is_meta else images


@dataclass(frozen=True)
class _Output:
    """What a layer gave: its shape, how that lies on the picture, or why it does not, and where it is in the graph."""

    shape: tuple[int, ...]
    layout: Layout | None
    place: Place
    why_none: str | None = None


class _Look:
    """What is seen of a model's layers while it runs."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self._model, self._batch = model, batch
        self._patches = find_patches(model.modules())
        self._axes = Axes(model, batch, self._patches)
        self._runs: dict[nn.Module, int] = {}
        self._outputs: dict[nn.Module, _Output] = {}
        self._others: dict[nn.Module, list[_Output]] = {}  # what else a layer gave
        self.scores: list[Tensor] = []
        self.output: Any = None
        self.pictures: Edge | None = None

    def watch(self, model: nn.Module, hooks: Hooks) -> None:
        """Look at the model and all its layers, whenever it runs next; its pass is recorded, for the graph."""
        self._axes.prepare()
        hooks.before_forward(model, self._record)
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.after_forward(module, self._keep_scores if module is model else self._keep)

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch.set_grad_enabled(True)

        # Copies that may be changed in place; frozen models are recorded too.
        copies = {
            it: caller_keeps(it).requires_grad_().clone() if it.is_floating_point() else it.clone()
            for it in tensors((args, kwargs))
        }
        self.pictures = edge_of(copies.get(self._batch.pictures, self._batch.pictures))
        return map_tensors((args, kwargs), copies.__getitem__)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._runs[module] = self._runs.get(module, 0) + 1
        found = [self._look_at(tensor, module) for tensor in floating_by_keys(output).values()]
        if found:
            self._outputs[module], *self._others[module] = found

    def _look_at(self, tensor: Tensor, module: nn.Module) -> _Output:
        shape = tuple(tensor.shape)
        layout = self._axes.find_layout(shape, module)
        is_text = layout is None and self._axes.holds_text(shape, module)
        is_shared = layout is not None and tensor.ndim > 3 and is_guess(layout, module, shape, self._batch.size)
        is_shared = is_shared and (is_softmax(tensor.grad_fn, tensor.ndim) if tensor.is_meta else are_shares(tensor))
        why = "its tokens include text" if is_text else "it returns attention weights" if is_shared else None
        layout = None if why else layout
        return _Output(shape, layout, to_place(tensor, layout, self._batch.size), why)

    def choose(self, depends: Mapping[Edge, bool]) -> None:
        """Of several tensors that a layer gave, the first with a grid that the score depends on, not through another."""
        for module, others in self._others.items():
            found = [it for it in (self._outputs[module], *others) if it.layout and it.place.edge in depends]
            passed = {node for it in found if it.place.edge for node in nodes_behind(it.place.edge[0])}
            last = [it for it in found if it.place.edge and it.place.edge[0] not in passed]
            self._outputs[module] = next(iter([*last, *found]), self._outputs[module])

    def settle(self) -> None:
        """Ask of what may have its channels first or last, once the model has run."""
        for module, output in self._outputs.items():
            if output.layout is None and output.why_none is None and output.shape:
                layout = try_all(output.shape, Outlet(type(module).__name__, module), self._batch, self._model)
                if layout is not None:
                    place = replace(output.place, places=math.prod(layout.grid))
                    self._outputs[module] = replace(output, layout=layout, place=place)

    def _keep_scores(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.scores, self.output = read_scores(None, output, self._batch.images), output

    def places(self, model: nn.Module) -> dict[str, Place]:
        modules = model.named_modules(remove_duplicate=False)
        return {name: self._outputs[module].place for name, module in modules if module in self._outputs}

    def find_layout(self, shape: Sequence[int]) -> Layout | None:
        """How an output of this shape lies on the pictures, whatever gave it."""
        return find_layout(shape, self._batch.size, None, self._batch.images, patches=self._patches)

    def find_guesses(self, layers: Mapping[str, nn.Module]) -> dict[str, PlacedLayer]:
        """Of these layers those where it is a guess how they lie on the pictures, and how that is; it is none for what
        another layer gives too, that knows."""
        found = {name: self._outputs[module] for name, module in layers.items()}
        laid = {
            name: PlacedLayer(Outlet(name, layers[name]), it.shape, it.layout)
            for name, it in found.items()
            if it.layout
        }
        doubtful = {
            name: placed
            for name, placed in laid.items()
            if placed.is_guess(self._batch) and placed.is_measurable(self._batch)
        }
        known = {found[name].place.edge: each.layout for name, each in laid.items() if name not in doubtful}
        known.pop(None, None)
        return {name: each for name, each in doubtful.items() if known.get(found[name].place.edge) != each.layout}

    def why_not(self, module: nn.Module, depends: Mapping[Edge, bool], *, run: bool = False) -> str | None:
        """Why no class activation map can be taken at this layer, or at its last `run`; None where it can."""
        if isinstance(module, torch.jit.ScriptModule):
            return "TorchScript"
        runs, output = self._runs.get(module, 0), self._outputs.get(module)
        if runs != 1 and not run:
            parts_ran = any(part in self._runs for part in module.modules())
            unseen = "not called itself, only its submodules" if parts_ran else "not called in evaluation mode"
            return f"runs {runs} times" if runs else unseen
        if output is None:
            return "returns no floating-point tensor"
        if output.layout is None:
            is_folded = len(output.shape) > 2 and output.shape[0] != self._batch.images
            return output.why_none or ("its first axis is not the batch" if is_folded else "no grid")
        edge = output.place.edge
        if edge is None or edge not in depends:
            return "the score does not depend on it"
        return None if depends[edge] else "only the class token reaches the score"

    def row(self, name: str, module: nn.Module, reason: str | None) -> LayerRow:
        output = self._outputs.get(module)
        edge = None if output is None else output.place.edge
        layout = None if output is None else output.layout
        return LayerRow(
            name=name,
            type=type(module).__name__,
            shape=None if output is None else output.shape,
            grid=None if layout is None else layout.grid,
            stride=None if layout is None else tuple(map(_stride, self._batch.size, layout.grid)),
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            cam=reason is None,
            reason=reason,
            is_suggested=False,
            both_signs=reason is None and edge is not None and not is_activated(edge),
        )


def _stride(length: int, cells: int) -> float:
    return length // cells if length % cells == 0 else length / cells  # whole numbers stay whole
