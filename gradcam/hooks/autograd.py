"""Gradients of scores at recorded activations, through the tail of the network alone."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import unserializable_hook

from gradcam.errors import BlindLayerError, LayerError, ModelError, join_names
from gradcam.hooks import pytorch

Edge = tuple[Node, int]  # an operation, and which of its outputs
GradientHook = Callable[[Tensor], Tensor | None]  # what it returns replaces the gradient, None leaves it

# Powers of two, so that scaling rounds nothing. The first whose gradients are finite is the one that loses least.
HALF_PRECISION_SCALES = tuple(2.0**exponent for exponent in (15, 10, 5, 0, -5, -10, -15))
MOST_BYTES = 2**28  # of one layer's gradients, for the classes that share a backward pass

CHANGED_VALUE = (
    "changes a value in place that the backward pass needs, so training would fail as well: replace the in-place operation "
    "with an out-of-place one."
)
OTHER_VIEW = (
    "After the layer, the model reads or changes in place another view of the layer's output or input, where no gradient "
    "can be recorded: choose an earlier layer."
)
# By what PyTorch says, in part, where what lies behind a layer is differentiated.
BEHIND_A_LAYER = {
    pytorch.HOOKED_VIEW: (
        "A module has a full backward hook, and its input or output is changed in place. PyTorch forbids this (pytorch "
        "issue 61519): remove the hook, or replace the in-place operation with an out-of-place one."
    ),
    pytorch.INFERENCE_TENSOR: (
        "The model has parameters or buffers created in torch.inference_mode(), which autograd cannot use: build or load "
        "the model outside that mode."
    ),
    pytorch.CHANGED_IN_PLACE: f"After the layer, the model {CHANGED_VALUE}",
    pytorch.UNRECORDED_VIEW: OTHER_VIEW,
    pytorch.CHANGED_LEAF: OTHER_VIEW,
    pytorch.RECURRENT: (
        "After the layer there is a recurrent network, for which cuDNN has gradients in training mode only: explain "
        "inside `with torch.backends.cudnn.flags(enabled=False):`."
    ),
    pytorch.NOT_DIFFERENTIABLE_TWICE: (
        "After the layer there is an operation without a second derivative, such as fused attention: choose a method that "
        "needs only the first derivative, such as 'gradcam', or a layer after that operation."
    ),
    pytorch.NO_FORMULA: (
        "After the layer there is an operation without a second derivative, or without any derivative: choose a layer after "
        "that operation, or a method that needs only the first derivative, such as 'gradcam'."
    ),
    pytorch.REENTRANT: (
        "After the layer there is a reentrant checkpoint, through which PyTorch computes no gradient at a layer: "
        "set use_reentrant=False, or switch checkpointing off for the explanation."
    ),
    pytorch.NO_DERIVATIVE: (
        "After the layer there is an operation without a derivative, so no layer before it has a gradient: choose a layer "
        "after it."
    ),
}

# The same of a whole model, where there is no layer to speak of.
VIEW_IN_PLACE = (
    "The model changes in place its input, or a view created without gradient recording: replace that operation with an "
    "out-of-place one."
)
IN_A_MODEL = BEHIND_A_LAYER | {
    pytorch.CHANGED_IN_PLACE: f"The model {CHANGED_VALUE}",
    pytorch.UNRECORDED_VIEW: VIEW_IN_PLACE,
    pytorch.CHANGED_LEAF: VIEW_IN_PLACE,
    pytorch.RECURRENT: (
        "The model contains a recurrent network, for which cuDNN has gradients in training mode only: run this "
        "inside `with torch.backends.cudnn.flags(enabled=False):`."
    ),
    pytorch.REENTRANT: (
        "The model has a reentrant checkpoint, through which PyTorch computes gradients of parameters only: "
        "set use_reentrant=False, or switch checkpointing off for this call."
    ),
}


@contextlib.contextmanager
def known_failures(explanations: Mapping[str, str]) -> Iterator[None]:
    """PyTorch's own errors for what is known to go wrong become a `ModelError` that says what to do. `explanations`: by
    what PyTorch says, in part."""
    try:
        yield
    except RuntimeError as error:
        explanation = next((it for part, it in explanations.items() if pytorch.says(error, [part])), None)
        if explanation is None:
            raise
        raise ModelError(explanation) from error


def jacobian(
    scores: Tensor, inputs: Sequence[Tensor], *, scaled: bool, most_bytes: int | None = None
) -> Iterator[list[Tensor | None]]:
    """The gradients of scores (N,K) at each of `inputs` (N,...): (k,N,...) for a few classes at a time, None without a
    path. The images of a batch do not depend on one another, so that one backward pass from a class's sum over them
    serves all. With `scaled`, for graphs with float16 in them, gradients pass through multiplied by a power of two and
    come back as float32, divided by it: they underflow neither on the way nor in the result. `most_bytes`: of one
    input's gradients, for the classes that share a backward pass; `MOST_BYTES` without it."""
    with torch.enable_grad():
        values = scores.sum(0)
    largest = max(tensor.numel() * tensor.element_size() for tensor in inputs)
    directions = torch.eye(len(values), dtype=values.dtype, device=values.device)
    classes = max(1, (most_bytes or MOST_BYTES) // largest)
    for chunk in [directions] if len(directions) <= classes else directions.split(classes):
        if not scaled:
            yield _backward(values, inputs, chunk, 1)
            continue
        for scale in HALF_PRECISION_SCALES:
            gradients = _backward(values, inputs, chunk, scale)
            if _are_finite(gradients):
                break
        yield [None if gradient is None else gradient.float() / scale for gradient in gradients]


def _are_finite(gradients: Iterable[Tensor | None]) -> bool:
    return all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients)


def _backward(values: Tensor, inputs: Sequence[Tensor], directions: Tensor, scale: float) -> list[Tensor | None]:
    if len(directions) > 1:
        with contextlib.suppress(RuntimeError):  # an operation that cannot be batched, or the loop raises it again
            return list(_gradients(values, inputs, grad_outputs=directions * scale, is_grads_batched=True))
    rows = []
    for direction in directions:
        with torch.enable_grad():  # a scalar: given `grad_outputs`, autograd first imports all of sympy
            value = values[0] if len(values) == 1 else values @ direction
            value = value if scale == 1 else value * scale
        rows.append(_gradients(value, inputs))
    if len(rows) == 1:
        return [None if gradient is None else gradient[None] for gradient in rows[0]]
    return [None if row[0] is None else torch.stack(row) for row in zip(*rows)]


def _gradients(values: Tensor, inputs: Sequence[Tensor], **options: Any) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(values, inputs, retain_graph=True, allow_unused=True, **options)


def curvatures(scores: Tensor, activations: Tensor, *, scaled: bool) -> Iterator[tuple[Tensor | None, ...]]:
    """For each class of scores (N,K), its gradient g at the activations A (N,...) and H A, the derivative of g A:
    (1,N,...). None without a path; a score that is linear behind the layer has an H A of zeros. `scaled` is as in
    `jacobian`."""
    with torch.enable_grad():
        values = scores.sum(0).unbind()
    for value in values:
        for scale in HALF_PRECISION_SCALES if scaled else (1.0,):
            pair = _second_order(value, activations, scale)
            if _are_finite(pair):
                break
        yield tuple(None if tensor is None else tensor[None] for tensor in pair)


def _second_order(value: Tensor, activations: Tensor, scale: float) -> tuple[Tensor | None, Tensor | None]:
    with torch.enable_grad():
        (gradient,) = _gradients(value * scale, [activations], create_graph=True)
    if gradient is None:
        return None, None
    product = None
    if gradient.requires_grad:
        with torch.enable_grad():
            total = (gradient * activations.detach()).sum()
        (product,) = _gradients(total, [activations])
    if product is None:
        # A function written in Python may give a gradient that cannot be differentiated again, and says so at best by a
        # node for the error that would come of it. Hooks, of which ours is one, are such functions that do nothing to it.
        hidden = [node for node in graph_of(value) if pytorch.is_python(node)]
        if hidden or any(map(pytorch.is_error, graph_of(gradient))):
            name = pytorch.show_function(hidden[0]) if hidden else "a function written in Python"
            raise ModelError(
                f"After the layer there is {name}, whose gradient cannot be differentiated again: choose a method that "
                "needs only the first derivative, such as 'gradcam', or a layer after that operation."
            )
        product = torch.zeros_like(gradient)
    if scale != 1:
        gradient, product = gradient.float() / scale, product.float() / scale
    return gradient.detach(), product


def graph_of(tensor: Tensor) -> list[Node]:
    """Every node of the graph behind a tensor, its own the first."""
    return [] if tensor.grad_fn is None else [tensor.grad_fn, *nodes_behind(tensor.grad_fn)]


def nodes_behind(node: Node) -> list[Node]:
    """Every node that leads to this one, each once."""
    found: list[Node] = [node]
    seen = {node}
    for each in found:  # which grows on the way
        for other, _ in each.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                found.append(other)
    return found[1:]


def edge_of(tensor: Tensor) -> Edge | None:
    """Return where in the graph a tensor comes from; None outside of it."""
    return None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


@dataclass(frozen=True)
class Tail:
    """The graph between recorded activations and scores. `is_bypassed`: the images reach the scores past the activations
    as well, as far as that was recorded."""

    nodes: Sequence[Node]
    is_bypassed: bool

    @functools.cached_property
    def route(self) -> Hashable:
        """What decides how activations lie in memory and which of them reach the scores, to be compared."""
        return tuple(pytorch.describe_operation(node) for node in self.nodes if not pytorch.is_copy(node))

    @property
    def is_joined(self) -> bool:
        """Whether something that was not recorded may join: an operation has an input without a graph, and that is no
        weight."""
        return any(
            given is None
            for node in self.nodes
            if not pytorch.takes_weights(node)
            for given, _ in node.next_functions[pytorch.overwrites(node) :]
        )


def start_of(tensor: Tensor) -> Edge | None:
    """Return where in the graph a tensor comes from, of a leaf where its gradient is accumulated."""
    if tensor.requires_grad and tensor.is_leaf and not tensor.is_inference():
        node, index, *_ = pytorch.find_edge(tensor)
        return node, index
    return edge_of(tensor)


def read_tail(scores: Iterable[Edge | None], activations: Iterable[Edge | None], images: Edge | None) -> Tail:
    """Return the graph that leads to these scores, up to these activations."""
    ends = set(activations)
    waiting = [edge for edge in dict.fromkeys(scores) if edge is not None and edge not in ends]
    edges, nodes, is_bypassed = set(waiting), dict[Node, None](), False
    for edge in waiting:  # which grows on the way
        nodes[edge[0]] = None
        is_bypassed = is_bypassed or edge == images
        # A copy overwrites all of what was there before, its first input.
        for node, index in edge[0].next_functions[pytorch.overwrites(edge[0]) :]:
            if node is not None and (node, index) not in edges and (node, index) not in ends:
                edges.add((node, index))
                waiting.append((node, index))
    return Tail(list(nodes), is_bypassed)


def leaves(scores: Tensor) -> list[Tensor]:
    """The tensors at which the graph behind scores ends."""
    return [leaf for node in graph_of(scores) for leaf in pytorch.list_leaf(node)]


def reached(scores: Tensor, inputs: Sequence[Tensor]) -> list[bool]:
    """For each of `inputs`, tensors in a graph, whether the scores' graph leads to it."""
    nodes, ends = set(graph_of(scores)), leaves(scores)
    return [any(end is each for end in ends) if each.is_leaf else each.grad_fn in nodes for each in inputs]


def no_gradient(layers: Sequence[str]) -> ModelError | BlindLayerError:
    """The error that tells why scores have no gradient: recording was off, or they do not depend on the layers."""
    return no_dependence(layers) if torch.is_grad_enabled() else recording_is_off(layers)


def recording_is_off(layers: Sequence[str]) -> ModelError:
    """The error for a model that switches recording off behind a layer."""
    return ModelError(
        f"Gradient recording is off after layer {join_names(layers)}: the model, or the code that calls it, disables "
        "recording (torch.no_grad or inference_mode in a forward method, a reentrant checkpoint around the layer). "
        "Remove that for the explanation, or choose a layer after it."
    )


def no_dependence(layers: Sequence[str]) -> BlindLayerError:
    """The error for a score that no path connects with a layer."""
    return BlindLayerError(
        f"The score does not depend on layer {join_names(layers)}: no recorded operation leads from the layer to the score. "
        "Choose a layer on the path to the score, and a score that is not detached from the model's output."
    )


def no_floating_tensor(layers: Iterable[str]) -> LayerError:
    """The error for layers whose output holds nothing that a gradient can be taken at."""
    return LayerError(
        f"Layer {join_names(layers)} returned no floating-point tensor: choose a layer whose output is or contains one."
    )


class GradientTap:
    """What is done to the gradient that comes back to a tensor, where all of it has come together. Edits sit on the
    tensor, as a user's own hook would: in the order of registration, and `retain_grad()` shows what comes. Looks sit
    behind all that, on the node that made the tensor. What is done in place to it later makes it another node's."""

    def __init__(self, tensor: Tensor, node: Node) -> None:
        self.edits: OrderedDict[int, tuple[int, GradientHook]] = OrderedDict()
        self.looks: OrderedDict[int, GradientHook] = OrderedDict()
        index = tensor.output_nr

        def edit(gradient: Tensor | None) -> Tensor | None:
            if gradient is None or not self.edits:
                return None
            # A block may give what its last part gave, which then has run first, whoever was registered first.
            return _through([it for _, it in sorted(self.edits.values(), key=lambda edit: edit[0])], gradient)

        def look(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            gradient = gradients[index]
            if gradient is None or not self.looks:
                return None
            return (*gradients[:index], _through(list(self.looks.values()), gradient), *gradients[index + 1 :])

        tensor.register_hook(unserializable_hook(edit))
        node.register_prehook(look)


def _through(functions: list[GradientHook], gradient: Tensor) -> Tensor:
    for function in functions:
        replacement = function(gradient)
        gradient = gradient if replacement is None else replacement
    return gradient
