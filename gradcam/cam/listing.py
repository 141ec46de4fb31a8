"""List every layer of a model: its output shape, its grid, and whether it can be a target layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.cam.grid_errors import are_attention_weights
from gradcam.cam.measure_layout import MIN_RESPONSES, PlacedLayer, choose_layout_by_response, count_responses
from gradcam.cam.suggest import OutputInfo, read_scores, release_graph, suggest, to_output_info
from gradcam.errors import ImageError, format_fields, shorten
from gradcam.hooks.autograd import Edge, get_edge, list_ancestor_nodes
from gradcam.hooks.containers import Batch, detach_input, floating_tensors_by_keys, list_tensors, map_tensors, to_batch
from gradcam.hooks.hooks import Hooks
from gradcam.hooks.preserve import preserve_state
from gradcam.hooks.pytorch import is_softmax
from gradcam.layers.axes import AxisResolver
from gradcam.layers.find import LayerRef, unwrap
from gradcam.layers.grids import list_layers_with_grid
from gradcam.layers.layout import Layout, is_guess
from gradcam.layers.paths import GradientPaths, is_nonnegative
from gradcam.layers.token_layout import USUAL_DEPTH, find_layout, find_patches, takes_volumes


@dataclass(frozen=True)
class LayerRow:
    """One layer of a model.

    `type` is the class of the module. `shape` is the shape of the output; None without an output. If the output has
    several tensors, `shape` is the shape of the explained tensor. `grid` is the grid (h,w) or (d,h,w) of the output on
    the image. `stride` is the image's size divided by the grid's size. Without a grid, `grid` and `stride` are None.
    `parameters` is the number of parameters, including submodules. `cam` is True if the layer can be a target layer;
    otherwise, `reason` is the reason why not. `is_suggested` marks the default layer of `gradcam.explain`. `both_signs`
    is True if a possible target layer does not end in an activation function such as ReLU, so that its values may be
    negative. Methods that assume non-negative activations may have another default layer, which
    `suggested_for_positive` marks. `guessed` is True if the layout is a guess. To test a guess, the image is changed at
    six points. `places` is the number of points at which the right cell responds. If `places` is below 4, the guess
    counts as wrong. `places` is None if the layout is certain, or if nothing can be measured, as on the meta device.
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
    guessed: bool = field(default=False, compare=False)
    places: int | None = field(default=None, compare=False)

    __repr__ = format_fields

    @property
    def is_out_of_place(self) -> bool:
        """Return True if too few of the layer's cells respond where the image changes."""
        return self.places is not None and self.places < MIN_RESPONSES


def list_layers(model: nn.Module, images: Any = 224) -> tuple[LayerRow, ...]:
    """List all layers of a model from one forward pass, and mark the layers that can be a target layer.

    If the layout of some layers is ambiguous, seven more passes test whether each cell responds to its part of the image.
    The model runs in evaluation mode, and is left unchanged.

    Parameters
    ----------
    model : nn.Module
        Any model. A model on the meta device needs no weights, and nothing is computed.
    images : int, tuple, Tensor or dict, default 224
        The size of an RGB image in pixels: the side of a square, or (height, width). For models of volumes or video
        clips, the size is (depth, height, width); the default depth is 16. You can also pass a model input, as in
        `explain`; the values of the input do not matter.

    Returns
    -------
    tuple of LayerRow
        One row per layer, in the order of `model.named_modules()`. The fields are `name`, `type`, `shape`, `grid`,
        `stride`, `parameters`, `cam`, `reason`, `is_suggested` and more. `cam` is True if the layer can be a target
        layer; otherwise, `reason` is the reason why not. `is_suggested` marks the default layer of `explain`. If the
        default layer runs several times, it also has a row for its last run: "layer4.1.relu#1".

    Raises
    ------
    ModelError
        If `model` is not a module.
    ImageError
        If `images` is not a valid input. Errors of the model itself are passed on unchanged.

    Notes
    -----
    The search for the default layer uses autograd's graph alone. The search does not detect zero gradients, such as the
    gradients before a head with zero weights.

    Examples
    --------
    >>> import gradcam, torchvision
    >>> rows = gradcam.list_layers(torchvision.models.resnet18(weights=None))
    >>> [(row.name, row.grid) for row in rows if row.is_suggested]
    [('layer4', (7, 7))]
    """
    model = unwrap(model)
    batch = to_batch(_to_images(model, images))
    recorder = _ListingRecorder(model, batch)
    with preserve_state(model), release_graph(model, lambda: recorder.pictures), Hooks() as hooks:
        recorder.watch(model, hooks)
        with_grid = list_layers_with_grid(model, batch)
    recorder.resolve_ambiguous_layouts()
    paths = GradientPaths(recorder.scores, recorder.pictures, recorder.find_layout)
    recorder.select_outputs(paths.depends)
    layers = {name: module for name, module in model.named_modules() if name}
    reasons = {name: recorder.explain_rejection(module, paths.depends) for name, module in layers.items()}
    guesses = recorder.find_guesses({name: module for name, module in layers.items() if reasons[name] is None})
    places = {} if batch.pictures.is_meta or not guesses else count_responses(model, batch, guesses)
    last_runs = {name: layers[name.rpartition("#")[0]] for name in with_grid if name not in layers}
    reasons |= {name: recorder.explain_rejection(module, paths.depends, run=True) for name, module in last_runs.items()}
    usable = [name for name in with_grid if reasons[name] is None]
    suggested = suggest(usable, recorder.list_output_info(model), paths, recorder.output) if usable else None
    first, positive = (None, None) if suggested is None else (suggested.layers[0], suggested.behind_activation)
    rows = []
    for layer, module in layers.items():
        suggested_runs = [run for run in last_runs if run in (first, positive) and run.rpartition("#")[0] == layer]
        for name in (layer, *suggested_runs):
            row = recorder.make_row(name, module, reasons[name])
            suggestion = {"is_suggested": name == first, "suggested_for_positive": name == positive != first}
            rows.append(replace(row, **suggestion, guessed=name in guesses, places=places.get(name)))
    return tuple(rows)


def _to_images(model: nn.Module, images: Any) -> Any:
    parameter = next(chain(model.parameters(), model.buffers()), torch.empty(0, dtype=torch.float32, device="cpu"))
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
        dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
        return torch.zeros(1, 3, *size, dtype=dtype, device=parameter.device)
    return map_tensors(images, lambda tensor: tensor.to("meta")) if parameter.is_meta else images


@dataclass(frozen=True)
class _LayerOutput:
    """A layer's output: its shape, its graph edge, and its layout on the image, or why it has no layout."""

    shape: tuple[int, ...]
    layout: Layout | None
    info: OutputInfo
    reason: str | None = None


class _ListingRecorder:
    """Records the layers' outputs and their graph while a model runs."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self._model, self._batch = model, batch
        self._patches = find_patches(model.modules())
        self._axes = AxisResolver(model, batch, self._patches)
        self._runs: dict[nn.Module, int] = {}
        self._outputs: dict[nn.Module, _LayerOutput] = {}
        self._other_outputs: dict[nn.Module, list[_LayerOutput]] = {}  # Further outputs of a layer.
        self.scores: list[Tensor] = []
        self.output: Any = None
        self.pictures: Edge | None = None

    def watch(self, model: nn.Module, hooks: Hooks) -> None:
        """Register hooks that record the next pass of the model and all its layers, including the graph."""
        self._axes.prepare()
        hooks.before_forward(model, self._record_inputs)
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.after_forward(module, self._record_scores if module is model else self._record_output)

    def _record_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch.set_grad_enabled(True)

        # Copy the inputs, because the model may change them in place. The copies require gradients, so that the graph
        # of a frozen model is recorded too.
        copies = {
            tensor: detach_input(tensor).requires_grad_().clone() if tensor.is_floating_point() else tensor.clone()
            for tensor in list_tensors((args, kwargs))
        }
        self.pictures = get_edge(copies.get(self._batch.pictures, self._batch.pictures))
        return map_tensors((args, kwargs), copies.__getitem__)

    def _record_output(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._runs[module] = self._runs.get(module, 0) + 1
        outputs = [self._describe_output(tensor, module) for tensor in floating_tensors_by_keys(output).values()]
        if outputs:
            self._outputs[module], *self._other_outputs[module] = outputs

    def _describe_output(self, tensor: Tensor, module: nn.Module) -> _LayerOutput:
        shape = tuple(tensor.shape)
        layout = self._axes.find_layout(shape, module)
        reason = "its tokens include text" if layout is None and self._axes.holds_text(shape, module) else None
        guessed = layout is not None and tensor.ndim > 3 and is_guess(layout, module, shape, self._batch.size)
        if guessed and (is_softmax(tensor.grad_fn, tensor.ndim) if tensor.is_meta else are_attention_weights(tensor)):
            layout, reason = None, "it returns attention weights"
        return _LayerOutput(shape, layout, to_output_info(tensor, layout, self._batch.size), reason)

    def select_outputs(self, depends: Mapping[Edge, bool]) -> None:
        """Select one output for each layer that returns several outputs.

        The first output is selected that has a grid, affects the score, and is not used to compute another output with
        these properties.
        """
        for module, other_outputs in self._other_outputs.items():
            edges = [(output, output.info.edge) for output in (self._outputs[module], *other_outputs) if output.layout]
            candidates = [(output, edge[0]) for output, edge in edges if edge and edge in depends]
            nodes_before = {previous for _, node in candidates for previous in list_ancestor_nodes(node)}
            last_outputs = [output for output, node in candidates if node not in nodes_before]
            if candidates:
                self._outputs[module] = last_outputs[0] if last_outputs else candidates[0][0]

    def resolve_ambiguous_layouts(self) -> None:
        """Measure the layout of outputs whose channels may come first or last. The model must have run before."""
        for module, output in self._outputs.items():
            if output.layout is None and output.reason is None and output.shape:
                layer = LayerRef(type(module).__name__, module)
                layout = choose_layout_by_response(output.shape, layer, self._batch, self._model)
                if layout is not None:
                    info = replace(output.info, cells=math.prod(layout.grid))
                    self._outputs[module] = replace(output, layout=layout, info=info)

    def _record_scores(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.scores, self.output = read_scores(None, output, self._batch.images), output

    def list_output_info(self, model: nn.Module) -> dict[str, OutputInfo]:
        modules = model.named_modules(remove_duplicate=False)
        return {name: self._outputs[module].info for name, module in modules if module in self._outputs}

    def find_layout(self, shape: Sequence[int]) -> Layout | None:
        """Return the layout of any output of this shape; None if the shape alone does not determine a layout."""
        return find_layout(shape, self._batch.size, None, self._batch.images, patches=self._patches)

    def find_guesses(self, layers: Mapping[str, nn.Module]) -> dict[str, PlacedLayer]:
        """Return the layers whose layout is a guess, each with the guessed layout.

        A layer is left out if another layer returns the same tensor with the same layout, and this layout is certain
        for the other layer.
        """
        outputs = {name: self._outputs[module] for name, module in layers.items()}
        doubtful, certain = dict[str, PlacedLayer](), dict[Edge | None, Layout]()
        for name, output in outputs.items():
            if output.layout:
                placed = PlacedLayer(LayerRef(name, layers[name]), output.shape, output.layout)
                if placed.is_guess(self._batch) and placed.is_measurable(self._batch):
                    doubtful[name] = placed
                elif output.info.edge is not None:
                    certain[output.info.edge] = output.layout
        return {name: layer for name, layer in doubtful.items() if certain.get(outputs[name].info.edge) != layer.layout}

    def explain_rejection(self, module: nn.Module, depends: Mapping[Edge, bool], *, run: bool = False) -> str | None:
        """Return why a layer cannot be a target layer; None if it can. With `run`, check only its last call."""
        if isinstance(module, torch.jit.ScriptModule):
            return "TorchScript"
        runs, output = self._runs.get(module, 0), self._outputs.get(module)
        if runs != 1 and not run:
            parts_ran = any(part in self._runs for part in module.modules())
            not_run = "only its submodules are called" if parts_ran else "not called in evaluation mode"
            return f"runs {runs} times" if runs else not_run
        if output is None:
            return "returns no floating-point tensor"
        if output.layout is None:
            is_folded = len(output.shape) > 2 and output.shape[0] != self._batch.images
            return output.reason or ("its first axis is not the batch" if is_folded else "no grid")
        edge = output.info.edge
        if edge is None or edge not in depends:
            return "the score does not depend on it"
        return None if depends[edge] else "the score depends only on its class token"

    def make_row(self, name: str, module: nn.Module, reason: str | None) -> LayerRow:
        shape = grid = stride = None
        both_signs = False
        if (output := self._outputs.get(module)) is not None:
            shape, edge = output.shape, output.info.edge
            both_signs = reason is None and edge is not None and not is_nonnegative(edge)
            if output.layout is not None:
                grid = output.layout.grid
                stride = tuple(map(_stride, self._batch.size, grid))
        parameters = sum(parameter.numel() for parameter in module.parameters())
        return LayerRow(
            name, type(module).__name__, shape, grid, stride, parameters,
            cam=reason is None, reason=reason, is_suggested=False, both_signs=both_signs,
        )  # fmt: skip


def _stride(length: int, cells: int) -> float:
    return length // cells if length % cells == 0 else length / cells  # An exact quotient is an int.
