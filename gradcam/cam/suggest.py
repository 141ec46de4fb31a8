"""Suggest the layer to explain if the user names none."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from gradcam.cam.candidates import find_layers_with_grid, search_batch_for_layers
from gradcam.cam.grid import order_key
from gradcam.cam.measure_layout import MIN_CELLS, choose_layout_by_response
from gradcam.hooks import pytorch
from gradcam.hooks.autograd import Edge, get_edge, list_graph_nodes, list_leaves, trace_score_graph
from gradcam.hooks.containers import Batch, detach_input, find_floating_tensor, list_tensors, map_tensors
from gradcam.hooks.hooks import Hooks
from gradcam.hooks.model_facts import ModelFacts
from gradcam.layers.axes import take_image
from gradcam.layers.find import LayerRef
from gradcam.layers.layout import Layout
from gradcam.layers.paths import GradientPaths, is_nonnegative
from gradcam.layers.token_layout import find_layout, find_patches, find_rival_layouts
from gradcam.targets.base import ScoreExtractor
from gradcam.targets.classes import is_custom_function, is_function, to_class_target

# If a layer has more than this many times the cells of the last layer, the layer is too early: it has computed only a
# small part of what the score depends on.
MAX_CELL_RATIO = 4
# If the output is dense, at least this many operations with weights must follow the layer. Later maps repeat the
# output.
MIN_WEIGHTS_AFTER_LAYER = 2
BRANCH_NOTE = (
    "The default layer '{}' is on a branch: only part of the image's information reaches the score through this layer. "
    "Name another layer, or fuse the heatmaps of several layers."
)
RUN_NOTE = (
    "The default layer '{}' is one run of a module that the model runs several times. Only part of the image's information "
    "reaches the score through this run. Name another run or layer. Fuse the heatmaps of several runs only if no run sees "
    "a mirrored or shifted image."
)
EARLY_NOTE = (
    "Layer '{}' comes before all attention blocks, so this heatmap shows little of what the model computes. No later layer "
    "has a grid and affects the score. If a later layer has an ambiguous grid, name that layer, and pass reshape=."
)
OUTPUT_NOTE = (
    "Layer '{}' returns the model's output, and no earlier layer has a usable grid. Name an earlier layer, and pass its "
    "grid with reshape=."
)
# A layer counts as a patch embedding if no attention, and at most this share of the operations with weights, comes
# before the end of the layer.
MAX_PATCH_EMBEDDING_SHARE = 0.25
# To find a layer after an activation function, search only this many of the last layers with the same grid.
MAX_LAYERS_TO_SEARCH = 4


Reshape = str | tuple[int, ...] | None
Values = TypeVar("Values")


@dataclass(frozen=True)
class OutputInfo:
    """A layer's output: its edge in the graph, its number of cells, and True if the output is a map (not tokens)."""

    edge: Edge | None
    cells: int
    is_map: bool


@dataclass(frozen=True)
class Suggestion:
    """Layers to explain, in order of preference.

    `layers` are all layers with a grid, the best first. `behind_activation` is the best layer for methods that assume
    non-negative values. `note` is a warning about the first layer. `bypassed` maps the names of the best layers to a
    bool: True if a path from the images to the score leads around the layer. `is_recorded` is True if later passes can
    use a graph that starts at the images. `outputs` are the layers that return the dense output itself. These layers
    come last in `layers`.
    """

    layers: Sequence[str]
    behind_activation: str
    note: str | None = None
    bypassed: Mapping[str, bool] = field(default_factory=dict)
    is_recorded: bool = True
    outputs: Sequence[str] = ()


def find_suggestion(
    model: nn.Module,
    batch: Batch,
    target: Any = None,
    reshape: Reshape = None,
    *,
    whole_batch: bool = False,
    facts: ModelFacts | None = None,
) -> Suggestion:
    """Return the layers at which to explain `target`, from one forward pass.

    The pass runs a single image. If the model rejects a single image, or if `whole_batch` is True, the pass runs the
    entire batch. Raises `LayerError` if no layer has a grid.
    """
    for batch_to_run in (take_image(batch), batch) if batch.images > 1 and not whole_batch else (batch,):
        with contextlib.suppress(Exception):  # If the model cannot be recorded, run it unrecorded below.
            return _record_suggestion(model, batch_to_run, target, reshape, facts)
    names = find_layers_with_grid(model, batch, reshape)
    return Suggestion(names, names[0], is_recorded=False)


def suggest(
    names: Sequence[str], info: Mapping[str, OutputInfo], paths: GradientPaths, output: Any, *, covers_all: bool = True
) -> Suggestion:
    """Order layers with a grid by preference. `names` are in the order of `list_layers_with_grid`, later layers first.

    The best layer is the last layer through which all image information reaches the score. A layer on one of several
    branches carries only a part of the information. If the score reads positions of the output, as in segmentation,
    maps near the output would repeat the output. The best layer is then the last layer with the coarsest grid, at the
    end of the encoder. `covers_all` is False if layers may be missing because the user has set the layout.
    """
    info = {name: info[name.rpartition("#")[0] if name not in info else name] for name in names}
    is_dense = _is_dense_score(output, info, paths)
    edges_of_outputs = {edge for edge, weights in paths.weights.items() if is_dense and weights == 0}
    outputs = [name for name in names if info[name].edge in edges_of_outputs]
    names = [name for name in names if name not in outputs]
    depending = [name for name in names if info[name].edge in paths]
    if not depending:
        names = [*names, *outputs]
        note = OUTPUT_NOTE.format(names[0]) if names[0] in outputs else None
        return Suggestion(names, names[0], note, outputs=outputs)
    inner = _list_inner_layers(depending, info, paths) if is_dense else []
    if inner:
        # Prefer coarse grids, but not grids with too few cells, such as the last levels of a feature pyramid.
        size = {name: (info[name].cells < MIN_CELLS, info[name].cells) for name in inner}
        best = sorted(inner, key=lambda name: (size[name], info[name].edge not in paths.whole))
    else:
        max_cells = MAX_CELL_RATIO * info[depending[0]].cells
        best = [name for name in depending if info[name].edge in paths.whole and info[name].cells <= max_cells]
    is_early = covers_all and not inner and _is_early(info[(best or depending)[0]].edge, paths)
    if is_early:
        best = [name for name in depending if not _is_early(info[name].edge, paths)][:1]
    ordered = list(dict.fromkeys([*best, *depending, *names, *outputs]))
    is_part = not inner and paths.whole and info[ordered[0]].edge not in paths.whole
    note = RUN_NOTE if is_part and "#" in ordered[0] else BRANCH_NOTE if is_part else None
    note = EARLY_NOTE if is_early and not best else note
    # For methods that assume non-negative values, prefer a layer after an activation function. It must have as many
    # cells as the best layer, and be among the last few layers with this number.
    best = best or ordered[:1]
    names_of_grid = [name for name in best if info[name].cells == info[best[0]].cells]
    last_edges = list(dict.fromkeys(info[name].edge for name in names_of_grid))[:MAX_LAYERS_TO_SEARCH]
    edges = {name: info[name].edge for name in names_of_grid if info[name].edge in last_edges}
    activated = next((name for name, edge in edges.items() if edge is not None and is_nonnegative(edge)), best[0])
    return Suggestion(ordered, activated, note and note.format(ordered[0]), outputs=outputs)


def _is_early(edge: Edge | None, paths: GradientPaths) -> bool:
    """Return whether a layer is a patch embedding, as `MAX_PATCH_EMBEDDING_SHARE` defines."""
    if edge is None:
        return False
    graphs = [list(trace_score_graph(ends, [], None).nodes) for ends in ([edge], paths.scores)]
    attention, all_attention = (sum(map(pytorch.is_attention_operation, nodes)) for nodes in graphs)
    weights, all_weights = (sum(map(pytorch.has_weights, nodes)) for nodes in graphs)
    return not attention and all_attention > 1 and weights <= MAX_PATCH_EMBEDDING_SHARE * all_weights


def read_scores(target: Any, output: Any, images: int) -> list[Tensor]:
    """Return the scores of an output: the target function's result, or the logits, or otherwise the first tensor."""
    try:
        if isinstance(target, ScoreExtractor):
            return [target.score(output, images).values]
        scores = target(output) if is_function(target) else to_class_target(target).find_logits(output, images)
    except Exception:  # Ignore the error here: `compute_scores` will raise it.
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        scores = find_floating_tensor(output if logits is None else logits)
    return [tensor for tensor in list_tensors(scores) if tensor.is_floating_point()]


def reads_rows(scores: Tensor, output: Any, images: int) -> bool:
    """Return whether scores are computed only from output tensors (N,) and (N,C), such as logits."""
    output_tensors = {edge: tensor for tensor in list_tensors(output) if (edge := get_edge(tensor)) is not None}
    shapes, visited, pending = [], set(), [get_edge(scores)]
    while pending:
        edge = pending.pop()
        if edge in output_tensors:
            shapes.append(output_tensors[edge].shape)
        elif edge is not None and edge not in visited:
            visited.add(edge)
            pending.extend((node, index) for node, index in edge[0].next_functions if node is not None)
    return bool(shapes) and all(len(shape) < 3 and shape[:1] == (images,) for shape in shapes)


def to_output_info(tensor: Tensor, layout: Layout | None, size: Sequence[int]) -> OutputInfo:
    """Describe a layer's output for `suggest`."""
    return OutputInfo(get_edge(tensor), 0 if layout is None else math.prod(layout.grid), tensor.ndim == len(size) + 2)


def _is_dense_score(output: Any, info: Mapping[str, OutputInfo], paths: GradientPaths) -> bool:
    """Return whether the score reads positions of the output, as in segmentation.

    The function returns True if two tensors reach the score without an operation with weights: an output tensor with
    positions, and the map of a layer.
    """

    def is_read(edge: Edge | None) -> bool:
        return edge is not None and paths.weights.get(edge) == 0

    has_places = any(tensor.ndim > 2 and is_read(get_edge(tensor)) for tensor in list_tensors(output))
    maps = (layer_info.edge for layer_info in info.values() if layer_info.is_map and layer_info.cells)
    return has_places and any(map(is_read, maps))


def _list_inner_layers(names: Iterable[str], info: Mapping[str, OutputInfo], paths: GradientPaths) -> list[str]:
    """List the layers that are far enough before the output. Pooled levels of a pyramid are left out."""
    edges = {name: info[name].edge for name in names}
    return [
        name
        for name, edge in edges.items()
        if edge is not None and paths.weights[edge] >= MIN_WEIGHTS_AFTER_LAYER and edge not in paths.pooled
    ]


@contextlib.contextmanager
def release_graph(model: nn.Module, find_start: Callable[[], Edge | None]) -> Iterator[None]:
    """Free the graph after a recorded pass: detach tensors that modules cache, such as a table of position biases.

    `find_start` returns the edge at which the graph of this pass starts. A pass of another thread starts at another
    edge, so its tensors are not detached.
    """
    ids_before = {id(tensor) for module in model.modules() for tensor in list_tensors(list(vars(module).values()))}
    try:
        yield
    finally:
        start, parameter_ids = find_start(), {id(parameter) for parameter in model.parameters()}

        def is_of_this_pass(tensor: Tensor) -> bool:
            if tensor.grad_fn is None or id(tensor) in ids_before:
                return False
            follows_start = start is not None and start[0] in list_graph_nodes(tensor)
            return follows_start or all(id(leaf) in parameter_ids for leaf in list_leaves(tensor))

        for module in model.modules():
            _detach_tensors(vars(module), is_of_this_pass)


def _detach_tensors(holder: Any, is_of_this_pass: Callable[[Tensor], bool], depth: int = 3) -> None:
    def detach(tensor: Tensor) -> Tensor:
        if not is_of_this_pass(tensor):
            return tensor
        # Detach in place to keep the tensor object; a view cannot be detached in place.
        return tensor.detach() if pytorch.is_view(tensor) else tensor.detach_()

    for key, value in list(enumerate(holder) if isinstance(holder, list) else holder.items()):
        if isinstance(value, (dict, list)) and depth:
            _detach_tensors(value, is_of_this_pass, depth - 1)
        elif isinstance(value, (Tensor, tuple)) and any(map(is_of_this_pass, list_tensors(value))):
            holder[key] = map_tensors(value, detach)


class _SuggestionRecorder:
    """Records the layers' outputs and their graph while a model runs."""

    def __init__(self, model: nn.Module, batch: Batch, target: Any, reshape: Reshape, facts: ModelFacts | None) -> None:
        self._modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
        self._batch, self._target, self._reshape, self._facts = batch, target, reshape, facts
        self._patches = find_patches(model.modules())
        self.info: dict[nn.Module, OutputInfo] = {}
        self.ambiguous_tokens: dict[nn.Module, tuple[int, ...]] = {}  # Shapes of tokens whose grid is ambiguous.
        self._levels: dict[nn.Module, list[Edge | None]] = {}  # The edges of the levels of feature pyramids.
        self.reads_places = False
        self.pictures: Edge | None = None
        self.paths: GradientPaths | None = None
        self.output: Any = None

    def watch(self, model: nn.Module, hooks: Hooks) -> None:
        hooks.before_forward(model, self._record_images)
        hooks.after_forward(model, self._record_scores)
        for module in dict.fromkeys(self._modules.values()):
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.after_forward(module, self._record_output)

    def _record_images(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch.set_grad_enabled(True)
        shape, dtype = self._batch.pictures.shape, self._batch.pictures.dtype

        def begin(tensor: Tensor) -> Tensor:
            if self.pictures is not None or tensor.shape != shape or tensor.dtype != dtype:
                return tensor
            # Clone, because the model may change the tensor in place.
            copy = detach_input(tensor).requires_grad_().clone()
            self.pictures = get_edge(copy)
            return copy

        return map_tensors((args, kwargs), begin)

    def _record_output(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if (tensor := find_floating_tensor(output)) is not None:
            layout = self._find_layout(tensor.shape, module)
            self.info[module] = to_output_info(tensor, layout, self._batch.size)
            if layout is None and tensor.ndim == 3:
                self.ambiguous_tokens[module] = tuple(tensor.shape)
        maps = [map_tensor for map_tensor in list_tensors(output) if map_tensor.ndim == len(self._batch.size) + 2]
        if len({map_tensor.shape[2:] for map_tensor in maps}) == len(maps) > 1:
            self._levels[module] = [get_edge(map_tensor) for map_tensor in maps]

    def find_pyramid(self, names: Sequence[str]) -> str | None:
        """Return the last layer that returns a feature pyramid, if a single head reads all levels; None otherwise."""
        paths = cast("GradientPaths", self.paths)
        levels = self.by_name(self._levels)  # Layers that run several times ("name#1") are not among the keys.
        for name in names if self.reads_places else ():
            weights = {paths.weights[edge] for edge in levels.get(name, []) if edge is not None and edge in paths}
            if len(weights) == 1 and min(weights) >= MIN_WEIGHTS_AFTER_LAYER:
                return name
        return None

    def by_name(self, values: Mapping[nn.Module, Values]) -> dict[str, Values]:
        """Return the values by module name instead of module. If a module has several names, its value is repeated."""
        return {name: values[module] for name, module in self._modules.items() if module in values}

    def has_ambiguous_tokens_after(self, layer: str) -> bool:
        """Return whether all image information passes through a later layer whose token grid is ambiguous."""
        finished = list(self.info)
        start = finished.index(self._modules[layer if layer in self._modules else layer.rpartition("#")[0]])
        later = [module for module in finished[start + 1 :] if module in self.ambiguous_tokens]
        return any(self.paths is not None and self.info[module].edge in self.paths.whole for module in later)

    def _record_scores(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        scores = read_scores(self._target, output, self._batch.images)
        self.paths, self.output = GradientPaths(scores, self.pictures, self._find_layout), output
        if is_custom_function(self._target):
            self.reads_places = not all(reads_rows(score, output, self._batch.images) for score in scores)

    def _find_layout(self, shape: Sequence[int], module: nn.Module | None = None) -> Layout | None:
        batch = self._batch
        layout = find_layout(shape, batch.size, module, batch.images, patches=self._patches, reshape=self._reshape)
        if layout is None or self._facts is None or "tokens" not in layout.kind:
            return layout
        return self._facts.get(order_key(layout, shape, batch.size)) or layout


def _record_suggestion(
    model: nn.Module, batch: Batch, target: Any, reshape: Reshape, facts: ModelFacts | None = None
) -> Suggestion:
    recorder = _SuggestionRecorder(model, batch, target, reshape, facts)
    discard: Any = lambda _: None  # noqa: E731  # Without saved tensors, the graph takes hardly any memory.
    discarded = torch.autograd.graph.saved_tensors_hooks(discard, discard)
    with release_graph(model, lambda: recorder.pictures), discarded, Hooks() as hooks:
        recorder.watch(model, hooks)
        names = search_batch_for_layers(model, batch, reshape)
    tokens = recorder.by_name(recorder.ambiguous_tokens)
    if not names and reshape is None and (measured := _measure_grid(model, batch, target, tokens)):
        return measured
    paths, info = cast("GradientPaths", recorder.paths), recorder.by_name(recorder.info)
    suggestion = suggest(names, info, paths, recorder.output, covers_all=reshape is None)
    if pyramid := recorder.find_pyramid(names):
        # One level of a pyramid may be computed from another level. If the graph started at the images, the gradient at
        # the earlier level would include the path through the later level. This path would count twice.
        return Suggestion(list(dict.fromkeys([pyramid, *suggestion.layers])), pyramid, is_recorded=False)
    edges = {name: info[name].edge for name in (suggestion.layers[0], suggestion.behind_activation) if name in info}
    tails = {name: trace_score_graph(paths.scores, [edge], recorder.pictures) for name, edge in edges.items()}
    suggestion = replace(suggestion, bypassed={name: tail.is_bypassed for name, tail in tails.items()})
    if reshape is not None or not recorder.has_ambiguous_tokens_after(suggestion.layers[0]):
        return suggestion
    return _measure_grid(model, batch, target, tokens) or suggestion


def _measure_grid(model: nn.Module, batch: Batch, target: Any, shapes: dict[str, tuple[int, ...]]) -> Suggestion | None:
    """Measure the grid of ambiguous tokens, and return a suggestion; None if the measurement is unclear."""
    modules, patches = dict(model.named_modules()), find_patches(model.modules())
    for name in reversed(list(shapes)):
        for candidate in find_rival_layouts(shapes[name], modules[name], batch.size, patches):
            suggestion = _record_suggestion(model, batch, target, candidate.grid)
            layer = suggestion.layers[0]
            if layer not in shapes:
                return None
            layout = choose_layout_by_response(shapes[layer], LayerRef(layer, modules[layer]), batch, model)
            if layout is not None and layout.grid != candidate.grid:
                return _record_suggestion(model, batch, target, layout.grid)
            return suggestion if layout is not None else None
    return None
