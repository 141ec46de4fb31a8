"""Find a layer of a model: by its dotted name, as a module, or by the ways on which pictures reach the score."""

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

from gradcam.errors import LayerError, ModelError, join_names, nearest, shorten
from gradcam.hooks import pytorch
from gradcam.hooks.autograd import Edge, edge_of
from gradcam.hooks.hooks import Hooks
from gradcam.hooks.nested import Batch, tensors
from gradcam.layers.layout import Layout, find_layout, find_patches

FindLayout = Callable[[Sequence[int]], Layout | None]  # how a tensor of this shape lies on the picture
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
WRAPPER_NAMES = ("module", "_orig_mod")  # what wrappers and compiled modules call the model inside
# By the full name of a model's class.
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


class Outlet(NamedTuple):
    """What is recorded of a model: what a module gives, all or one of its tensors, in its only run or in one of them.
    `keys`: the keys and indices that lead to the tensor. `run`: counted from 0, None where it runs once."""

    name: str
    module: nn.Module
    keys: tuple[str, ...] = ()
    run: int | None = None


def unwrap(model: Any) -> nn.Module:
    """The Python module inside `DataParallel`, `DistributedDataParallel`, `torch.compile`; `ModelError` for what is none."""
    while isinstance(model, WRAPPERS) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, WRAPPERS) else model._orig_mod
    refuse_other_kinds(model)
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


def refuse_other_kinds(model: object) -> None:
    """Raises `ModelError` for what is no module of layers that can be looked into, if it is known what to do about it."""
    kind, is_module = type(model), isinstance(model, nn.Module)
    if is_module and not kind.__module__.startswith("ultralytics."):
        return
    names = [f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__]
    what = next((what for form, what in OTHER_KINDS.items() if any(re.match(form, name) for name in names)), None)
    for path in (".model", ".model.model") if what is None and not is_module else ():
        with contextlib.suppress(AttributeError):
            if isinstance(operator.attrgetter(path[1:])(model), nn.Module):
                what = f"not a torch.nn.Module, but contains one: explain its {path}"
    if what is not None:
        raise ModelError(f"The model, {kind.__name__}, is {what}.")


def find_layers(model: nn.Module, layers: Sequence[str | nn.Module]) -> list[Outlet]:
    """Several, each once. Raises as `check_layers` and `find_layer`."""
    found = [find_layer(model, layer) for layer in check_layers(layers)]
    return list({outlet.name: outlet for outlet in found}.values())


def check_layers(layers: Sequence[str | nn.Module]) -> Sequence[str | nn.Module]:
    """The layers. Raises `LayerError` for what is no list of at least one."""
    if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
        raise LayerError(f"layers is {shorten(layers)}, expected a list of at least one layer, by name or as modules.")
    return layers


def find_layer(model: nn.Module, layer: str | nn.Module) -> Outlet:
    """The layer of that name, or with that module. `model` is unwrapped. A name may still have the parts that wrappers
    put in (`module.`, `_orig_mod.`). Behind it may stand which of several tensors is meant, by its key or index, and
    which run of the module: "backbone:out", "encoder.layer4#1". Raises `LayerError` for an unknown one, and offers the
    nearest."""
    if isinstance(layer, nn.Module):
        layer = _compiled_from(layer)
        for name, module in model.named_modules():
            if module is layer and name:
                return Outlet(name, layer)
        what = "the model itself" if layer is model else "not part of the model"
        child = next((name for name, _ in model.named_children()), "layer4")
        raise LayerError(
            f"The layer, {type(layer).__name__}, is {what}: choose a module inside it, such as model.{child}."
        )
    if not isinstance(layer, str):
        raise LayerError(
            f"The layer is {shorten(layer)}, expected a dotted name such as 'layer4', or a module of the model."
        )
    plain, _, run = layer.rpartition("#") if re.search(r"#\d+$", layer, re.ASCII) else (layer, "", "")
    for name, *keys in ([layer], plain.split(":")):  # a name of its own may have any character but a dot
        if (found := _find_name(model, name)) is not None:
            full = found[0] + layer[len(name) :]
            return Outlet(full, found[1], tuple(keys), int(run) if run and name != layer else None)
    modules = {name: module for name, module in model.named_modules() if name}
    offers = nearest(plain.partition(":")[0], modules) or list(dict(model.named_children()))
    hint = f"Nearest: {join_names(offers)}." if offers else "It has no submodules."
    raise LayerError(f"There is no layer {shorten(layer)} in {type(model).__name__}. {hint}")


def _find_name(model: nn.Module, layer: str) -> tuple[str, nn.Module] | None:
    for name in filter(None, (layer, without_wrappers(layer))):
        with contextlib.suppress(AttributeError):
            return name, _compiled_from(model.get_submodule(name))
    named = model.named_modules()
    by_plain_name = {without_wrappers(name): (name, _compiled_from(module)) for name, module in named if name}
    return by_plain_name.get(layer)


def _compiled_from(module: nn.Module) -> nn.Module:
    return getattr(module, "_orig_mod", module)


def without_wrappers(name: str) -> str:
    """A layer's name without the parts that wrappers put in."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)


def layers_with_grid(model: nn.Module, batch: Batch, reshape: str | tuple[int, ...] | None = None) -> list[str]:
    """The names of the layers that gave a grid, the last to finish first, those that ran once before last runs and earlier
    runs of others; found by one forward pass. Where
    a block and its last part give the same output, the block comes first. Those that give several tensors come behind
    all that give one. Left out is what gives its input back as it came, adaptive pooling, whose grid is a coarser copy
    of the one before it, and auxiliary heads beside the score."""
    names = {module: name for name, module in _modules_outside_attention(model) if name}
    decoders = tuple(name for module, name in names.items() if "Decoder" in type(module).__name__)
    patches = find_patches(model.modules())
    runs: Counter[str] = Counter()
    finished: dict[bool, list[tuple[str, int]]] = {False: [], True: []}  # by whether they give several tensors

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        name = names[module]
        runs[name] += 1
        found = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
        is_auxiliary = any(part.startswith("aux") for part in name.split("."))
        if not found or is_auxiliary or type(module).__name__.startswith("Adaptive"):
            return
        shape = found[0].shape
        is_query = len(shape) == 3 and name.startswith(decoders)  # of a decoder, whose rows are no places
        if is_query or gives_back(module, args, found[0]):
            return
        if find_layout(shape, batch.size, module, batch.images, patches=patches, reshape=reshape):
            finished[len(found) > 1].append((name, runs[name]))

    with torch.no_grad(), Hooks() as hooks:
        for module in names:
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.after_forward(module, look)
        batch.run(model)
    ended = [(name, run) for several in (False, True) for name, run in reversed(finished[several])]
    once = [name for name, _ in ended if runs[name] == 1]
    last_runs = [f"{name}#{run - 1}" for name, run in ended if runs[name] == run > 1]
    return once + last_runs + [f"{name}#{run - 1}" for name, run in ended if run < runs[name]]


def _modules_outside_attention(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Those with their names; inside attention values are not yet mixed, or lie in windows. A norm that comes first in
    attention is none of its parts: some blocks have it there. What has blocks inside is a network, whatever its name."""
    yield name, module
    title = type(module).__name__.lower()
    is_named = "block" not in title and any(it in title for it in ("attention", "attn", "mhsa", "msa", "multihead"))
    is_named = is_named and not any("block" in type(part).__name__.lower() for part in module.modules())
    children = [] if isinstance(module, nn.Sequential) else list(module.children())  # of any name, but the parts of one
    if not name or not (
        is_named or all(any(isinstance(it, kind) for it in children) for kind in (nn.Softmax, nn.Linear))
    ):
        for child_name, child in module.named_children():
            yield from _modules_outside_attention(child, f"{name}.{child_name}".lstrip("."))
    else:
        for first_name, first in itertools.islice(module.named_children(), 1):
            if "Norm" in type(first).__name__:
                yield f"{name}.{first_name}", first


def gives_back(module: nn.Module, args: tuple[Any, ...], tensor: Tensor) -> bool:
    """Whether a module did nothing, as Identity and Dropout in evaluation mode do; an operation in place did something."""
    return any(tensor is given for given in args) and not getattr(module, "inplace", False)


class Ways:
    """The ways through autograd's graph on which pictures reach scores, and what they pass. `pictures`: where in the
    graph the model's copy of them comes from. `find_layout` tells class tokens from patches. Saved tensors are not
    looked at: there may be none. `depends`: everything that leads to the scores, and whether it does so with more than
    its class token. `whole`: all that no way goes round. `weights`: how many times weights mix the channels behind it,
    on the way that has the fewest. `pooled`: what the pictures reach through adaptive pooling alone."""

    def __init__(self, scores: Iterable[Tensor], pictures: Edge | None, find_layout: FindLayout) -> None:
        self._find_layout = find_layout
        self.scores = [edge for edge in map(edge_of, scores) if edge is not None]
        self._order = _sort(self.scores)
        self.depends = self._find_dependence()
        self.whole = frozenset[Edge]() if pictures is None else self._find_whole(pictures)
        self.weights = dict.fromkeys(self.scores, 0)
        for edge in self._order:
            behind = self.weights[edge] + pytorch.mixes_all_channels(edge[0])
            for given in _inputs(edge):
                self.weights[given] = min(self.weights.get(given, behind), behind)
        self.pooled: set[Edge] = set()
        for edge in reversed(self._order):
            inputs = [it for it in _inputs(edge) if _inputs(it)]  # no parameters
            if pytorch.is_adaptive_pool(edge[0]) or (inputs and self.pooled.issuperset(inputs)):
                self.pooled.add(edge)

    def __contains__(self, edge: Edge | None) -> bool:
        return edge is not None and self.depends.get(edge, False)

    def _find_dependence(self) -> dict[Edge, bool]:
        # Where a model reads `x[:, 0]` of its tokens, the gradient is zero on every patch, up to the last attention: from
        # there, that is, up to the last operation that mixes tokens.
        found: dict[Edge, bool] = {}
        waiting = [(edge, True) for edge in self.scores]
        while waiting:
            edge, with_patches = waiting.pop()
            if edge in found and found[edge] >= with_patches:
                continue
            found[edge] = with_patches
            onward = pytorch.mixes_tokens(edge[0]) or (with_patches and not self._reads_prefix(edge[0]))
            waiting.extend((given, onward) for given in _inputs(edge))
        return found

    def _find_whole(self, pictures: Edge) -> frozenset[Edge]:
        """What is on as many ways as there are: those from the pictures to it times those from it to the end. The end
        are the scores; where these read a class token only, it is the last operation that mixes tokens into it."""
        ends, order = self.scores, _sort(self.scores, stop=self._reads_prefix)
        if pictures not in order:
            reading = set(order)
            ends = [
                next((it for it in self._order if it not in reading and pytorch.mixes_tokens(it[0])), self._order[0])
            ]
            order = _sort(ends)
        behind = dict.fromkeys(order, 0) | dict.fromkeys(ends, 1)
        for edge in order:
            for given in _inputs(edge):
                if given in behind:
                    behind[given] += behind[edge]
        before = dict.fromkeys(order, 0)
        for edge in reversed(order):
            before[edge] = 1 if edge == pictures else sum(before.get(given, 0) for given in _inputs(edge))
        total = behind.get(pictures, 0)
        return frozenset(edge for edge in order if total and before[edge] * behind[edge] == total)

    def _reads_prefix(self, node: Node) -> bool:
        """Return whether the operation takes some of the tokens beside the patches, and nothing else."""
        selection = pytorch.read_selection(node)
        if selection is None:
            return False
        shape, axis, read = selection
        layout = self._find_layout(shape)
        if layout is None or "tokens" not in layout.kind or axis != 1 - layout.image_axis:
            return False
        cells = layout.list_cells()
        return len(read) > 0 and not set(read).intersection(
            range(shape[axis])[cells] if isinstance(cells, slice) else cells
        )


def is_activated(edge: Edge) -> bool:
    """Whether all comes out of functions such as ReLU, moved, pooled or joined since: next to nothing is negative."""
    waiting, seen = [edge], {edge}
    while waiting:
        each = waiting.pop()
        if pytorch.is_activation(each[0]):
            continue
        given = _inputs(each)
        if not given or not pytorch.keeps_nonnegative(each[0], len(given)):
            return False
        waiting.extend(it for it in given if it not in seen)
        seen.update(given)
    return True


def _inputs(edge: Edge) -> list[Edge]:
    return [(node, index) for node, index in edge[0].next_functions if node is not None]


def _sort(ends: Sequence[Edge], stop: Callable[[Node], bool] = lambda _: False) -> list[Edge]:
    """All that leads to these, each behind all that it leads to; not through operations at which to stop."""
    found: list[Edge] = []
    seen: set[Edge] = set()
    for end in ends:
        waiting = [(end, False)]
        while waiting:
            edge, is_done = waiting.pop()
            if is_done:
                found.append(edge)
            elif edge not in seen:
                seen.add(edge)
                waiting.append((edge, True))
                waiting.extend((given, False) for given in ([] if stop(edge[0]) else _inputs(edge)))
    return found[::-1]
