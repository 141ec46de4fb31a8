"""Which layer is explained where none is named."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradcam.cam.forward import find_layers_with_grid, look_for_layers
from gradcam.cam.grid import try_all
from gradcam.cam.places import MIN_CELLS
from gradcam.hooks import pytorch
from gradcam.hooks.autograd import Edge, edge_of, graph_of, leaves, read_tail
from gradcam.hooks.facts import Facts
from gradcam.hooks.hooks import Hooks
from gradcam.hooks.nested import Batch, caller_keeps, first_floating, map_tensors, tensors
from gradcam.layers.find import Outlet, Ways, is_activated
from gradcam.layers.layout import Layout, find_layout, find_patches, find_rivals, one_image, order_question
from gradcam.targets.base import Reader
from gradcam.targets.classes import is_custom_function, is_function, to_class_target

STAGE = 4  # times as many places at most: a layer further up sees much less of what the score is made of
FEWEST_WEIGHTS = 2  # behind a layer, for a score of places: behind one, maps are the output again
PART = (
    "The default layer '{}' is on a branch: only part of the image's information reaches the score through this layer. "
    "Name another layer, or fuse the heatmaps of several layers."
)
PART_RUN = (
    "The default layer '{}' is one of several runs: only part of the image's information reaches the score through this "
    "run. Name another run or layer. Fuse the heatmaps of several runs only if none of them sees a mirrored or shifted "
    "image."
)
EARLY = (
    "Layer '{}' comes before all attention, and no later layer has a grid whose cells reach the score. This "
    "heatmap shows little of what the model computes. Name a later layer, with reshape= if the grid of that layer is "
    "ambiguous."
)
OUTPUT = (
    "Layer '{}' returns the model's output, and no earlier layer has a usable grid. Name an earlier layer, with "
    "reshape=."
)
EARLY_SHARE = 0.25  # of a model's weights, up to which a layer in front of all attention is a patch embedding
LAST = 4  # layers of the same grid, counted from the end, among which one behind an activation is looked for


@dataclass(frozen=True)
class Place:
    """Where a layer's output is in the graph, and of how many places its grid is. `is_map`: it is no row of tokens."""

    edge: Edge | None
    places: int
    is_map: bool


@dataclass(frozen=True)
class Suggestion:
    """`layers`: those with a grid, the best first. `behind_activation`: the best for methods that want no negative
    values. `note`: what a person should know of the first. `bypassed`: whether the images reach the score past the best
    layers, by name. `is_recorded`: the graph from the images on was recorded, which not every model allows. `outputs`:
    those of the layers that give a dense output itself, which come last."""

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
    reshape: str | tuple[int, ...] | None = None,
    *,
    whole_batch: bool = False,
    facts: Facts | None = None,
) -> Suggestion:
    """The layers to explain `target` at; found by one forward pass, of one image if the model takes that, unless of the
    `whole_batch`. Raises `LayerError` where no layer has a grid."""
    for each in (one_image(batch), batch) if batch.images > 1 and not whole_batch else (batch,):
        with contextlib.suppress(Exception):  # what cannot be recorded may well run unrecorded
            return _look(model, each, target, reshape, facts)
    names = find_layers_with_grid(model, batch, reshape)
    return Suggestion(names, names[0], is_recorded=False)


def suggest(
    names: Sequence[str], places: Mapping[str, Place], ways: Ways, output: Any, *, are_all: bool = True
) -> Suggestion:
    """The best of these layers with a grid, which come in the order of their ends, the last first. That is the last one
    through which all of the picture reaches the score: a branch beside others shows a part of it. Where the score is of
    places in the output, as in segmentation, maps near the output would be the output again. There it is the last one
    of the coarsest grid, the encoder's end. `are_all`: no layers were left out for a layout that the user named."""
    places = {name: places[name.rpartition("#")[0] if name not in places else name] for name in names}
    is_dense = _reads_places(output, places, ways)
    edges_of_outputs = {edge for edge, weights in ways.weights.items() if is_dense and weights == 0}
    outputs = [name for name in names if places[name].edge in edges_of_outputs]
    names = [name for name in names if name not in outputs]
    depending = [name for name in names if places[name].edge in ways]
    if not depending:
        names = [*names, *outputs]
        return Suggestion(names, names[0], OUTPUT.format(names[0]) if names[0] in outputs else None, outputs=outputs)
    inner = _inside(depending, places, ways) if is_dense else []
    if inner:
        size = {name: (places[name].places < MIN_CELLS, places[name].places) for name in inner}  # pyramids end in few
        best = sorted(inner, key=lambda name: (size[name], places[name].edge not in ways.whole))
    else:
        most = STAGE * places[depending[0]].places
        best = [name for name in depending if places[name].edge in ways.whole and places[name].places <= most]
    is_early = are_all and not inner and _is_early(places[(best or depending)[0]].edge, ways)
    if is_early:
        best = [name for name in depending if not _is_early(places[name].edge, ways)][:1]
    ordered = list(dict.fromkeys([*best, *depending, *names, *outputs]))
    is_part = not inner and ways.whole and places[ordered[0]].edge not in ways.whole
    part = PART_RUN if "#" in ordered[0] else PART
    note = EARLY.format(ordered[0]) if is_early and not best else part.format(ordered[0]) if is_part else None
    # The first of the best behind an activation; the very first where there is none among the last few of its grid.
    best = best or ordered[:1]
    alike = [name for name in best if places[name].places == places[best[0]].places]
    last = list(dict.fromkeys(places[name].edge for name in alike))[:LAST]
    edges = {name: places[name].edge for name in alike if places[name].edge in last}
    activated = next((name for name, edge in edges.items() if edge is not None and is_activated(edge)), best[0])
    return Suggestion(ordered, activated, note, outputs=outputs)


def _is_early(edge: Edge | None, ways: Ways) -> bool:
    """Return whether a layer is a patch embedding: no attention and few weights come before it, and blocks after it."""
    if edge is None:
        return False
    before, all_nodes = (read_tail(ends, [], None).nodes for ends in ([edge], ways.scores))
    attention, has_weights = _count_kinds(before)
    all_attention, all_weights = _count_kinds(all_nodes)
    return not attention and all_attention > 1 and has_weights <= EARLY_SHARE * all_weights


def _count_kinds(nodes: Iterable[Node]) -> tuple[int, int]:
    """Count the operations of attention, and those with weights."""
    kinds = [(pytorch.attends(node), pytorch.has_weights(node)) for node in nodes]
    return sum(attends for attends, _ in kinds), sum(has_weights for _, has_weights in kinds)


def read_scores(target: Any, output: Any, images: int) -> list[Tensor]:
    """What is explained of an output: its logits, or what a target function gives; its first tensor if there is neither."""
    try:
        if isinstance(target, Reader):
            return [target.score(output, images).values]
        found = target(output) if is_function(target) else to_class_target(target).find_logits(output, images)
    except Exception:  # it is said where the score is needed
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        found = first_floating(output if logits is None else logits)
    return [tensor for tensor in tensors(found) if tensor.is_floating_point()]


def reads_rows(scores: Tensor, output: Any, images: int) -> bool:
    """Return whether scores read nothing of an output but tensors (N,) and (N,C), such as logits."""
    parts = {edge: tensor for tensor in tensors(output) if (edge := edge_of(tensor)) is not None}
    shapes, visited, pending = [], set(), [edge_of(scores)]
    while pending:
        edge = pending.pop()
        if edge in parts:
            shapes.append(parts[edge].shape)
        elif edge is not None and edge not in visited:
            visited.add(edge)
            pending.extend((node, index) for node, index in edge[0].next_functions if node is not None)
    return bool(shapes) and all(len(shape) < 3 and shape[:1] == (images,) for shape in shapes)


def to_place(tensor: Tensor, layout: Layout | None, size: Sequence[int]) -> Place:
    """Where a layer's output is."""
    return Place(edge_of(tensor), 0 if layout is None else math.prod(layout.grid), tensor.ndim == len(size) + 2)


def _reads_places(output: Any, places: Mapping[str, Place], ways: Ways) -> bool:
    """Whether the score is of places in the output: no weight comes behind it, nor behind a map that it is made of."""

    def is_read(edge: Edge | None) -> bool:
        return edge is not None and ways.weights.get(edge) == 0

    has_places = any(tensor.ndim > 2 and is_read(edge_of(tensor)) for tensor in tensors(output))
    return has_places and any(place.is_map and place.places and is_read(place.edge) for place in places.values())


def _inside(names: Iterable[str], places: Mapping[str, Place], ways: Ways) -> list[str]:
    """The layers that are not next to the output, nor of a pyramid of pooled copies."""
    edges = {name: places[name].edge for name in names}
    return [
        name
        for name, edge in edges.items()
        if edge is not None and ways.weights[edge] >= FEWEST_WEIGHTS and edge not in ways.pooled
    ]


@contextlib.contextmanager
def no_graph_kept(model: nn.Module, find_start: Callable[[], Edge | None]) -> Iterator[None]:
    """What modules keep of a recorded pass, such as a table of biases for the next one, is let go of its graph.
    `find_start`: where that pass began. What another thread explains meanwhile has begun elsewhere, and is left to
    it."""
    before = {id(tensor) for module in model.modules() for tensor in tensors(list(vars(module).values()))}
    try:
        yield
    finally:
        start, own = find_start(), {id(parameter) for parameter in model.parameters()}

        def is_ours(tensor: Tensor) -> bool:
            if tensor.grad_fn is None or id(tensor) in before:
                return False
            is_of_pass = start is not None and start[0] in graph_of(tensor)
            return is_of_pass or all(id(leaf) in own for leaf in leaves(tensor))

        for module in model.modules():
            _let_go(vars(module), is_ours)


def _let_go(holder: Any, is_ours: Callable[[Tensor], bool], depth: int = 3) -> None:
    def detached(tensor: Tensor) -> Tensor:
        if not is_ours(tensor):
            return tensor
        return tensor.detach() if pytorch.is_view(tensor) else tensor.detach_()  # the same object, unless it is a view

    for key, value in list(enumerate(holder) if isinstance(holder, list) else holder.items()):
        if isinstance(value, (dict, list)) and depth:
            _let_go(value, is_ours, depth - 1)
        elif isinstance(value, (Tensor, tuple)) and any(map(is_ours, tensors(value))):
            holder[key] = map_tensors(value, detached)


class _Watch:
    """What is seen of a model's layers while it runs, recorded."""

    def __init__(
        self, model: nn.Module, batch: Batch, target: Any, reshape: str | tuple[int, ...] | None, facts: Facts | None
    ) -> None:
        self._facts = facts
        self._modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
        self._batch, self._target, self._reshape = batch, target, reshape
        self._patches = find_patches(model.modules())
        self._places: dict[nn.Module, Place] = {}
        self._open: dict[nn.Module, tuple[int, ...]] = {}  # shapes of tokens without a certain grid
        self._levels: dict[nn.Module, list[Edge | None]] = {}  # of outputs with several grids
        self.is_of_places = False
        self.pictures: Edge | None = None
        self.ways: Ways | None = None
        self.output: Any = None

    def watch(self, model: nn.Module, hooks: Hooks) -> None:
        hooks.before_forward(model, self._record)
        hooks.after_forward(model, self._finish)
        for module in dict.fromkeys(self._modules.values()):
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.after_forward(module, self._keep)

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch.set_grad_enabled(True)
        shape, dtype = self._batch.pictures.shape, self._batch.pictures.dtype

        def begin(tensor: Tensor) -> Tensor:
            if self.pictures is not None or tensor.shape != shape or tensor.dtype != dtype:
                return tensor
            copy = caller_keeps(tensor).requires_grad_().clone()  # which the model may change in place
            self.pictures = edge_of(copy)
            return copy

        return map_tensors((args, kwargs), begin)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tensor = first_floating(output)
        if tensor is not None:
            layout = self._find_layout(tensor.shape, module)
            self._places[module] = to_place(tensor, layout, self._batch.size)
            if layout is None and tensor.ndim == 3:
                self._open[module] = tuple(tensor.shape)
        parts = [part for part in tensors(output) if part.ndim == len(self._batch.size) + 2]
        if len({part.shape[2:] for part in parts}) == len(parts) > 1:
            self._levels[module] = [edge_of(part) for part in parts]

    def find_pyramid(self, names: Sequence[str]) -> str | None:
        """Return the last of these layers that gives a feature pyramid, all levels of which the same head reads."""
        ways = cast("Ways", self.ways)
        for name in names if self.is_of_places else ():
            module = self._modules.get(name)  # None for one of several runs
            edges = [] if module is None else self._levels.get(module, [])
            weights = {ways.weights[edge] for edge in edges if edge is not None and edge in ways}
            if len(weights) == 1 and min(weights) >= FEWEST_WEIGHTS:
                return name
        return None

    @property
    def places(self) -> dict[str, Place]:
        return {name: self._places[module] for name, module in self._modules.items() if module in self._places}

    @property
    def open(self) -> dict[str, tuple[int, ...]]:
        """The shapes of tokens without a certain grid, by name."""
        return {name: self._open[module] for name, module in self._modules.items() if module in self._open}

    def is_open_behind(self, layer: str) -> bool:
        """Whether there are such tokens behind a layer, and all of the picture passes them."""
        ended = list(self._places)
        start = ended.index(self._modules[layer if layer in self._modules else layer.rpartition("#")[0]])
        behind = [module for module in ended[start + 1 :] if module in self._open]
        return any(self.ways is not None and self._places[module].edge in self.ways.whole for module in behind)

    def _finish(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        scores = read_scores(self._target, output, self._batch.images)
        self.ways, self.output = Ways(scores, self.pictures, self._find_layout), output
        if is_custom_function(self._target):
            self.is_of_places = not all(reads_rows(score, output, self._batch.images) for score in scores)

    def _find_layout(self, shape: Sequence[int], module: nn.Module | None = None) -> Layout | None:
        batch = self._batch
        layout = find_layout(shape, batch.size, module, batch.images, patches=self._patches, reshape=self._reshape)
        if layout is None or self._facts is None or "tokens" not in layout.kind:
            return layout
        return self._facts.get(order_question(layout, shape, batch.size)) or layout


def _look(
    model: nn.Module, batch: Batch, target: Any, reshape: str | tuple[int, ...] | None, facts: Facts | None = None
) -> Suggestion:
    watch = _Watch(model, batch, target, reshape, facts)
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_graph_kept(model, lambda: watch.pictures))
        forget: Any = lambda _: None  # noqa: E731  # the graph alone takes no memory
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(forget, forget))
        hooks = stack.enter_context(Hooks())
        watch.watch(model, hooks)
        names = look_for_layers(model, batch, reshape)
    # The model has run to its end, so that the ways are there.
    if not names and reshape is None and (certain := _ask_for_grid(model, batch, target, watch.open)):
        return certain
    ways, places = cast("Ways", watch.ways), watch.places
    found = suggest(names, places, ways, watch.output, are_all=reshape is None)
    if pyramid := watch.find_pyramid(names):
        # A level may be made of another one, through which gradients from the images on would count twice.
        return Suggestion(list(dict.fromkeys([pyramid, *found.layers])), pyramid, is_recorded=False)
    edges = {name: places[name].edge for name in (found.layers[0], found.behind_activation) if name in places}
    tails = {name: read_tail(ways.scores, [edge], watch.pictures) for name, edge in edges.items()}
    found = replace(found, bypassed={name: tail.is_bypassed for name, tail in tails.items()})
    if reshape is not None or not watch.is_open_behind(found.layers[0]):
        return found
    return _ask_for_grid(model, batch, target, watch.open) or found


def _ask_for_grid(
    model: nn.Module, batch: Batch, target: Any, shapes: Mapping[str, tuple[int, ...]]
) -> Suggestion | None:
    """The same with tokens whose number fits several grids, of which the model is asked for the right one; or None."""
    modules, patches = dict(model.named_modules()), find_patches(model.modules())
    for name in reversed(list(shapes)):
        for rival in find_rivals(shapes[name], modules[name], batch.size, patches):
            found = _look(model, batch, target, rival.grid)
            layer = found.layers[0]
            layout = try_all(shapes[layer], Outlet(layer, modules[layer]), batch, model) if layer in shapes else None
            if layout is None:
                return None
            return found if layout.grid == rival.grid else _look(model, batch, target, layout.grid)
    return None
