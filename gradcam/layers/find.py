"""Find a layer of a model: by its dotted name, as a module, or by the paths from the image to the score."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradcam.errors import LayerError, ModelError, find_similar_names, join_names, shorten
from gradcam.hooks import pytorch
from gradcam.hooks.autograd import Edge, get_edge
from gradcam.hooks.containers import Batch, list_tensors
from gradcam.hooks.hooks import Hooks
from gradcam.layers.layout import Layout, find_layout, find_patches

FindLayout = Callable[[Sequence[int]], Layout | None]  # Returns the layout of a tensor of this shape.
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
WRAPPER_NAMES = ("module", "_orig_mod")  # Attributes under which wrappers and compiled modules store the model.
# Descriptions of objects that are no PyTorch modules, by a pattern for the full name of the class.
OTHER_KINDS = {
    r"torch\.export\.exported_program\.": (
        "an exported program, whose graph has no layers: explain torch.export.unflatten(program)"
    ),
    r"ultralytics\.(?!nn\.)": "an ultralytics wrapper around a model: explain its .model",
    r"onnx": "an ONNX model, which has no gradients: explain the PyTorch model that it was exported from",
    r"(tensorflow|keras|tf_keras|flax|coremltools|tensorrt|openvino)\.": (
        "a model of another framework: explain a PyTorch model with the same weights"
    ),
}


class LayerRef(NamedTuple):
    """A module output to record: which module, which of its tensors, and which of its runs.

    `keys` are the keys and indices that lead to the tensor. `run` is counted from 0; None if the module runs once.
    """

    name: str
    module: nn.Module
    keys: tuple[str, ...] = ()
    run: int | None = None


def unwrap(model: Any) -> nn.Module:
    """Return the module inside `DataParallel`, `DistributedDataParallel` or `torch.compile`.

    Raises `ModelError` if there is no such module.
    """
    while isinstance(model, WRAPPERS) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, WRAPPERS) else model._orig_mod
    refuse_foreign_models(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "The model is a TorchScript module, whose layer outputs hooks cannot replace: explain the original Python model."
        )
    if not isinstance(model, nn.Module):
        advice = "pass the module inside it, or a module of your own whose forward method calls it"
        if inspect.isroutine(model):
            advice = "wrap the function in a module, and pass that without torch.vmap"
        raise ModelError(f"The model is {type(model).__name__}, expected a torch.nn.Module: {advice}.")
    return model


def refuse_foreign_models(model: object) -> None:
    """Raise `ModelError` for a known kind of object that is no PyTorch module, and say what to pass instead."""
    kind, is_module = type(model), isinstance(model, nn.Module)
    if is_module and not kind.__module__.startswith("ultralytics."):
        return
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    advice = next(
        (advice for pattern, advice in OTHER_KINDS.items() if any(re.match(pattern, name) for name in names)), None
    )
    for path in (".model", ".model.model") if advice is None and not is_module else ():
        with contextlib.suppress(AttributeError):
            if isinstance(operator.attrgetter(path[1:])(model), nn.Module):
                advice = f"not a torch.nn.Module, but contains one: explain its {path}"
    if advice is not None:
        raise ModelError(f"The model, {kind.__name__}, is {advice}.")


def find_layers(model: nn.Module, layers: Sequence[str | nn.Module]) -> list[LayerRef]:
    """Find several layers, each once. Raises the errors of `check_layers` and `find_layer`."""
    refs = [find_layer(model, layer) for layer in check_layers(layers)]
    return list({ref.name: ref for ref in refs}.values())


def check_layers(layers: Sequence[str | nn.Module]) -> Sequence[str | nn.Module]:
    """Return the layers. Raises `LayerError` if they are not a list of at least one layer."""
    if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
        raise LayerError(f"layers is {shorten(layers)}, expected a list of at least one layer, by name or as modules.")
    return layers


def find_layer(model: nn.Module, layer: str | nn.Module) -> LayerRef:
    """Find a layer of an unwrapped model, by its name or by the module itself.

    A name may contain the parts that wrappers add (`module.`, `_orig_mod.`). It may end with the key or index of one of
    several tensors, and with the run of the module: "backbone:out", "encoder.layer4#1". Raises `LayerError` for an
    unknown layer, and lists the nearest names.
    """
    if isinstance(layer, nn.Module):
        layer = _uncompiled(layer)
        for name, module in model.named_modules():
            if module is layer and name:
                return LayerRef(name, layer)
        relation = "the model itself" if layer is model else "not part of the model"
        child = next((name for name, _ in model.named_children()), "layer4")
        raise LayerError(
            f"The layer, {type(layer).__name__}, is {relation}: choose a module inside it, such as model.{child}."
        )
    if not isinstance(layer, str):
        raise LayerError(
            f"The layer is {shorten(layer)}, expected a dotted name such as 'layer4', or a module of the model."
        )
    base_name, _, run = layer.rpartition("#") if re.search(r"#\d+$", layer, re.ASCII) else (layer, "", "")
    for name, *keys in ([layer], base_name.split(":")):  # A module's name may itself contain ":" or "#".
        if (match := _find_name(model, name)) is not None:
            full_name = match[0] + layer[len(name) :]
            return LayerRef(full_name, match[1], tuple(keys), int(run) if run and name != layer else None)
    modules = {name: module for name, module in model.named_modules() if name}
    offers = find_similar_names(base_name.partition(":")[0], modules) or list(dict(model.named_children()))
    hint = f"Nearest: {join_names(offers)}." if offers else "It has no submodules."
    raise LayerError(f"There is no layer {shorten(layer)} in {type(model).__name__}. {hint}")


def _find_name(model: nn.Module, layer: str) -> tuple[str, nn.Module] | None:
    for name in filter(None, (layer, without_wrappers(layer))):
        with contextlib.suppress(AttributeError):
            return name, _uncompiled(model.get_submodule(name))
    named_modules = model.named_modules()
    by_plain_name = {without_wrappers(name): (name, _uncompiled(module)) for name, module in named_modules if name}
    return by_plain_name.get(layer)


def _uncompiled(module: nn.Module) -> nn.Module:
    return getattr(module, "_orig_mod", module)


def without_wrappers(name: str) -> str:
    """Return a layer's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)


def list_layers_with_grid(model: nn.Module, batch: Batch, reshape: str | tuple[int, ...] | None = None) -> list[str]:
    """Return the names of the layers whose output is a grid, found by one forward pass.

    Layers that ran once come first, then the last runs of other layers, then their earlier runs. Within each group,
    layers with one tensor come before layers with several, and the last to finish comes first. If a block and its last
    part return the same output, the block comes first.

    Three kinds of layers are left out: modules that return their input unchanged, adaptive pooling, whose grid is a
    coarser copy of the previous grid, and auxiliary heads, which do not lead to the score.
    """
    names = {module: name for name, module in _modules_outside_attention(model) if name}
    decoders = tuple(name for module, name in names.items() if "Decoder" in type(module).__name__)
    patches = find_patches(model.modules())
    runs: Counter[str] = Counter()
    finished: dict[bool, list[tuple[str, int]]] = {False: [], True: []}  # True: several tensors.

    def record_grid(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        name = names[module]
        runs[name] += 1
        floating = [tensor for tensor in list_tensors(output) if tensor.is_floating_point()]
        is_auxiliary = any(part.startswith("aux") for part in name.split("."))
        if not floating or is_auxiliary or type(module).__name__.startswith("Adaptive"):
            return
        shape = floating[0].shape
        # A decoder's queries have no positions on the image.
        is_query = len(shape) == 3 and name.startswith(decoders)
        if is_query or returns_input(module, args, floating[0]):
            return
        if find_layout(shape, batch.size, module, batch.images, patches=patches, reshape=reshape):
            finished[len(floating) > 1].append((name, runs[name]))

    with torch.no_grad(), Hooks() as hooks:
        for module in names:
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.after_forward(module, record_grid)
        batch.run(model)
    runs_from_last = [(name, run) for has_several in (False, True) for name, run in reversed(finished[has_several])]
    single_runs = [name for name, _ in runs_from_last if runs[name] == 1]
    last_runs = [f"{name}#{run - 1}" for name, run in runs_from_last if runs[name] == run > 1]
    return single_runs + last_runs + [f"{name}#{run - 1}" for name, run in runs_from_last if run < runs[name]]


def _modules_outside_attention(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules outside attention, with their names.

    Inside an attention module, tokens are not mixed yet, or are arranged in windows. Some attention modules start with
    a norm. This norm is yielded too, because it works on the tokens from outside. A module that contains blocks is a
    network, whatever its name.
    """
    yield name, module
    class_name = type(module).__name__.lower()
    is_attention = "block" not in class_name and any(
        word in class_name for word in ("attention", "attn", "mhsa", "msa", "multihead")
    )
    is_attention = is_attention and not any("block" in type(part).__name__.lower() for part in module.modules())
    # An attention module with another name is recognised by its children: a softmax and a linear layer. A Sequential
    # with such children is no attention module.
    children = [] if isinstance(module, nn.Sequential) else list(module.children())
    if not name or not (
        is_attention
        or all(any(isinstance(child, part_type) for child in children) for part_type in (nn.Softmax, nn.Linear))
    ):
        for child_name, child in module.named_children():
            yield from _modules_outside_attention(child, f"{name}.{child_name}".lstrip("."))
    else:
        for first_name, first in itertools.islice(module.named_children(), 1):
            if "Norm" in type(first).__name__:
                yield f"{name}.{first_name}", first


def returns_input(module: nn.Module, args: tuple[Any, ...], tensor: Tensor) -> bool:
    """Return whether a module returned its input unchanged, as Identity and Dropout in evaluation mode do."""
    return any(tensor is argument for argument in args) and not getattr(module, "inplace", False)


class GradientPaths:
    """The paths through the autograd graph from the images to the scores, and facts about the edges on these paths.

    `pictures` is the edge of the model's copy of the images. `find_layout` distinguishes class tokens from patches. The
    tensors that autograd saved are not read, because it may have saved none.

    `depends` tells, for each edge that leads to the scores, whether the scores depend on more than its class token.
    `whole` contains the edges that every path passes. `weights` has, for each edge, the smallest number of operations
    that mix channels by weights on a path to the scores. `pooled` contains the edges that the images reach through
    adaptive pooling only.
    """

    def __init__(self, scores: Iterable[Tensor], pictures: Edge | None, find_layout: FindLayout) -> None:
        self._find_layout = find_layout
        self.scores = [edge for edge in map(get_edge, scores) if edge is not None]
        self._order = _sort_edges(self.scores)
        self.depends = self._find_dependence()
        self.whole = frozenset[Edge]() if pictures is None else self._find_bottlenecks(pictures)
        self.weights = dict.fromkeys(self.scores, 0)
        for edge in self._order:
            count = self.weights[edge] + pytorch.mixes_all_channels(edge[0])
            for input_edge in _input_edges(edge):
                self.weights[input_edge] = min(self.weights.get(input_edge, count), count)
        self.pooled: set[Edge] = set()
        for edge in reversed(self._order):
            # Parameters have no inputs.
            inputs = [input_edge for input_edge in _input_edges(edge) if _input_edges(input_edge)]
            if pytorch.is_adaptive_pool(edge[0]) or (inputs and self.pooled.issuperset(inputs)):
                self.pooled.add(edge)

    def __contains__(self, edge: Edge | None) -> bool:
        return edge is not None and self.depends.get(edge, False)

    def _find_dependence(self) -> dict[Edge, bool]:
        # If a model reads only the class token, as `x[:, 0]`, the gradient of every patch is zero after the last
        # attention. Before it, scores depend on the patches again, because attention mixes tokens.
        depends_on_patches: dict[Edge, bool] = {}
        pending = [(edge, True) for edge in self.scores]
        while pending:
            edge, with_patches = pending.pop()
            if edge in depends_on_patches and depends_on_patches[edge] >= with_patches:
                continue
            depends_on_patches[edge] = with_patches
            onward = pytorch.mixes_tokens(edge[0]) or (with_patches and not self._reads_prefix(edge[0]))
            pending.extend((input_edge, onward) for input_edge in _input_edges(edge))
        return depends_on_patches

    def _find_bottlenecks(self, pictures: Edge) -> frozenset[Edge]:
        """Return the edges that every path from the images passes.

        The number of paths through an edge is the number from the images to it (`paths_in`), times the number from it
        to the end (`paths_out`). The end is the scores or, if these read only a class token, the last operation that
        mixes tokens into it.
        """
        ends, order = self.scores, _sort_edges(self.scores, stop=self._reads_prefix)
        if pictures not in order:
            reading_edges = set(order)
            ends = [
                next(
                    (edge for edge in self._order if edge not in reading_edges and pytorch.mixes_tokens(edge[0])),
                    self._order[0],
                )
            ]
            order = _sort_edges(ends)
        paths_out = dict.fromkeys(order, 0) | dict.fromkeys(ends, 1)
        for edge in order:
            for input_edge in _input_edges(edge):
                if input_edge in paths_out:
                    paths_out[input_edge] += paths_out[edge]
        paths_in = dict.fromkeys(order, 0)
        for edge in reversed(order):
            paths_in[edge] = 1 if edge == pictures else sum(paths_in.get(source, 0) for source in _input_edges(edge))
        total = paths_out.get(pictures, 0)
        return frozenset(edge for edge in order if total and paths_in[edge] * paths_out[edge] == total)

    def _reads_prefix(self, node: Node) -> bool:
        """Return whether the operation selects tokens outside the grid only, such as the class token."""
        selection = pytorch.read_selection(node)
        if selection is None:
            return False
        shape, axis, positions = selection
        layout = self._find_layout(shape)
        if layout is None or "tokens" not in layout.kind or axis != 1 - layout.image_axis:
            return False
        cells = layout.list_cells()
        return len(positions) > 0 and not set(positions).intersection(
            range(shape[axis])[cells] if isinstance(cells, slice) else cells
        )


def is_nonnegative(edge: Edge) -> bool:
    """Return whether all values are outputs of functions such as ReLU, so that hardly any value is negative."""
    pending, visited = [edge], {edge}
    while pending:
        current = pending.pop()
        if pytorch.is_activation(current[0]):
            continue
        inputs = _input_edges(current)
        if not inputs or not pytorch.keeps_nonnegative(current[0], len(inputs)):
            return False
        pending.extend(input_edge for input_edge in inputs if input_edge not in visited)
        visited.update(inputs)
    return True


def _input_edges(edge: Edge) -> list[Edge]:
    return [(node, index) for node, index in edge[0].next_functions if node is not None]


def _sort_edges(ends: Sequence[Edge], stop: Callable[[Node], bool] = lambda _: False) -> list[Edge]:
    """Return all edges that lead to `ends`, each after the edges that it leads to.

    If `stop` is True for an operation, its inputs are left out.
    """
    sorted_edges: list[Edge] = []
    visited: set[Edge] = set()
    for end in ends:
        pending = [(end, False)]
        while pending:
            edge, has_visited_inputs = pending.pop()
            if has_visited_inputs:
                sorted_edges.append(edge)
            elif edge not in visited:
                visited.add(edge)
                pending.append((edge, True))
                pending.extend((input_edge, False) for input_edge in ([] if stop(edge[0]) else _input_edges(edge)))
    return sorted_edges[::-1]
