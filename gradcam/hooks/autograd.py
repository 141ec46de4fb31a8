"""Compute gradients of scores with respect to recorded activations. The backward pass stops at the activations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradcam.errors import BlindLayerError, LayerError, ModelError, join_names
from gradcam.hooks import pytorch

Edge = tuple[Node, int]  # (operation, index of its output)
# A function that returns a new gradient, or None to leave the gradient unchanged.
GradientHook = Callable[[Tensor], Tensor | None]

# The factors by which scores may be multiplied before a backward pass in half precision. Multiplying by a power of two
# does not round. The largest factor with finite gradients is used, because it causes the least underflow.
HALF_PRECISION_SCALES = tuple(2.0**exponent for exponent in (15, 10, 5, 0, -5, -10, -15))
MAX_GRADIENT_BYTES = 2**28  # The limit for one layer's gradients in a backward pass of several classes.

OUT_OF_PLACE = "replace the in-place operation with an out-of-place one."
CHANGED_VALUE = f"overwrites a value that the backward pass needs, so training would fail as well: {OUT_OF_PLACE}"
# Maps a part of PyTorch's error text to the message for a backward pass that fails after a layer.
ADVICE_AFTER_LAYER = {
    pytorch.HOOKED_VIEW: "A module has a full backward hook, and its input or output is changed in place. PyTorch forbids "
    f"this (pytorch issue 61519): remove the hook, or {OUT_OF_PLACE}",
    pytorch.INFERENCE_TENSOR: "The model has parameters or buffers created in torch.inference_mode(), which autograd "
    "cannot use: build or load the model outside that mode.",
    pytorch.CHANGED_IN_PLACE: f"After the layer, the model {CHANGED_VALUE}",
    **dict.fromkeys((pytorch.UNRECORDED_VIEW, pytorch.CHANGED_LEAF), "After the layer, the model reads or overwrites "
    "another view of the layer's output or input. No gradient can be recorded for this view: choose an earlier layer."),
    pytorch.RECURRENT: "After the layer there is a recurrent network. cuDNN computes its gradients in training mode only: "
    "explain inside `with torch.backends.cudnn.flags(enabled=False):`.",
    pytorch.NOT_DIFFERENTIABLE_TWICE: "After the layer there is an operation without a second derivative, such as fused "
    "attention: choose a method that needs only the first derivative, such as 'gradcam', or a layer after that operation.",
    pytorch.NO_FORMULA: "After the layer there is an operation without a second derivative, or without any derivative: "
    "choose a layer after that operation. If only the second derivative is missing, you can also choose 'gradcam'.",
    pytorch.REENTRANT: "After the layer there is a reentrant checkpoint, so PyTorch computes no gradient at the "
    "layer: set use_reentrant=False, or switch checkpointing off for the explanation.",
    pytorch.NO_DERIVATIVE: "After the layer there is an operation without a derivative, so no layer before this "
    "operation has a gradient: choose a layer after the operation.",
}  # fmt: skip


@dataclass(frozen=True)
class TranslatedErrors:
    """A context that replaces known PyTorch errors by a `ModelError` with advice.

    `explanations` maps a part of PyTorch's error text to the advice.
    """

    explanations: Mapping[str, str]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            for part, explanation in self.explanations.items():
                if pytorch.message_contains(error, [part]):
                    raise ModelError(explanation) from error


def jacobian(
    scores: Tensor,
    inputs: Sequence[Tensor],
    *,
    scaled: bool,
    most_bytes: int | None = None,
    most_classes: int | None = None,
) -> Iterator[list[Tensor | None]]:
    """Yield the gradients of scores (N,K) at each of `inputs` (N,...), as (k,N,...) for k classes at a time.

    If the scores do not depend on an input, its gradient is None. The images of a batch do not affect each other. One
    backward pass from the sum of a class's scores over the batch therefore gives the gradients of all images.

    `scaled` prevents underflow in graphs with float16: the scores are multiplied by a power of two before the backward
    pass, and the gradients are converted to float32 and divided by the same power.

    `most_bytes` limits the memory for one input's gradients of all classes that share a backward pass (default
    `MAX_GRADIENT_BYTES`). At most `most_classes` share a backward pass.
    """
    with torch.enable_grad():
        values = scores if scores.numel() == 1 else scores.sum(0)
    largest = max(tensor.numel() * tensor.element_size() for tensor in inputs)
    # The gradient of a single score needs no direction.
    directions = torch.eye(len(values), dtype=values.dtype, device=values.device) if len(values) > 1 else values
    classes = max(1, min((most_bytes or MAX_GRADIENT_BYTES) // largest, most_classes or len(directions)))
    for chunk in [directions] if len(directions) <= classes else directions.split(classes):
        if not scaled:
            yield _backward(values, inputs, chunk, 1)
            continue
        for scale in HALF_PRECISION_SCALES:
            gradients = _backward(values, inputs, chunk, scale)
            if _are_finite(gradients):
                break
        yield [None if gradient is None else gradient.float() / scale for gradient in gradients]


def fill_missing_gradients(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Replace missing gradients by zeros, unless all gradients are missing."""
    count = next((len(gradient) for gradient in gradients if gradient is not None), None)
    if count is None:
        return gradients
    pairs = zip(gradients, inputs)
    return [tensor.new_zeros(count, *tensor.shape) if gradient is None else gradient for gradient, tensor in pairs]


def _are_finite(gradients: Iterable[Tensor | None]) -> bool:
    return all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients)


def _backward(values: Tensor, inputs: Sequence[Tensor], directions: Tensor, scale: float) -> list[Tensor | None]:
    if len(directions) > 1:
        # If an operation cannot be batched, the loop below computes the gradients. The loop raises any other error
        # again.
        with contextlib.suppress(RuntimeError):
            return list(_gradients(values, inputs, grad_outputs=directions * scale, is_grads_batched=True))
    rows = []
    for direction in directions if len(values) > 1 else [values]:
        with torch.enable_grad():  # Reduce to a scalar: with `grad_outputs`, autograd would import sympy.
            value = values if direction is values else values @ direction
            value = value if scale == 1 else value * scale
        rows.append(_gradients(value, inputs))
    if len(rows) == 1:
        return [None if gradient is None else gradient[None] for gradient in rows[0]]
    return [None if row[0] is None else torch.stack(row) for row in zip(*rows)]


def _gradients(values: Tensor, inputs: Sequence[Tensor], **options: Any) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(values, inputs, retain_graph=True, allow_unused=True, **options)


def list_graph_nodes(tensor: Tensor) -> list[Node]:
    """Return all nodes of the graph that leads to a tensor, starting with its `grad_fn`."""
    return [] if tensor.grad_fn is None else [tensor.grad_fn, *list_ancestor_nodes(tensor.grad_fn)]


def list_ancestor_nodes(node: Node) -> list[Node]:
    """Return all nodes that lead to this node, each once, without this node."""
    nodes: list[Node] = [node]
    visited = {node}
    for current in nodes:  # The list grows during the loop.
        for parent, _ in current.next_functions:
            if parent is not None and parent not in visited:
                visited.add(parent)
                nodes.append(parent)
    return nodes[1:]


def get_edge(tensor: Tensor) -> Edge | None:
    """Return the graph edge (operation and output index) that computed a tensor; None if the tensor has no graph."""
    return None if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


@dataclass(frozen=True)
class ScoreGraph:
    """The autograd graph from recorded activations to scores.

    `is_bypassed` is True if a recorded path leads from the images to the scores without passing the activations.
    """

    nodes: Sequence[Node]
    is_bypassed: bool

    @functools.cached_property
    def route(self) -> Hashable:
        """Return the operations as a tuple that can be compared with the tuple of another graph.

        Two kinds of cached facts hold only for equal tuples: layouts, and the activations that affect the scores.
        """
        return tuple(pytorch.describe_operation(node) for node in self.nodes if not pytorch.is_copy(node))

    @property
    def is_joined(self) -> bool:
        """Return True if an operation has an unrecorded input that is not a weight."""
        nodes = (node for node in self.nodes if not pytorch.takes_weights(node))
        inputs = (node.next_functions[pytorch.is_overwriting_copy(node) :] for node in nodes)
        return any(parent is None for edges in inputs for parent, _ in edges)


def get_start_edge(tensor: Tensor) -> Edge | None:
    """Return the edge at which a tensor was computed; for a leaf, the edge that accumulates its gradient."""
    if tensor.requires_grad and tensor.is_leaf and not tensor.is_inference():
        return pytorch.find_edge(tensor)[:2]
    return get_edge(tensor)


def trace_score_graph(
    scores: Iterable[Edge | None], activations: Iterable[Edge | None], images: Edge | None
) -> ScoreGraph:
    """Return the graph that leads to the scores, cut off at the activations."""
    ends = set(activations)
    edge_queue = [edge for edge in dict.fromkeys(scores) if edge is not None and edge not in ends]
    edges, nodes, is_bypassed = set(edge_queue), dict[Node, None](), False
    for edge in edge_queue:  # The list grows during the loop.
        nodes[edge[0]] = None
        is_bypassed = is_bypassed or edge == images
        # A copy overwrites its first input completely, so no path leads through the first input.
        for node, index in edge[0].next_functions[pytorch.is_overwriting_copy(edge[0]) :]:
            if node is not None and (node, index) not in edges and (node, index) not in ends:
                edges.add((node, index))
                edge_queue.append((node, index))
    return ScoreGraph(list(nodes), is_bypassed)


def list_leaves(scores: Tensor) -> list[Tensor]:
    """Return the tensors at which the graph of the scores ends."""
    return [node.variable for node in list_graph_nodes(scores) if hasattr(node, "variable")]


def find_dependence(scores: Tensor, inputs: Sequence[Tensor]) -> list[bool]:
    """Return, for each input tensor, whether the scores depend on it."""
    nodes, ends = set(list_graph_nodes(scores)), list_leaves(scores)
    return [any(leaf is tensor for leaf in ends) if tensor.is_leaf else tensor.grad_fn in nodes for tensor in inputs]


def no_gradient_error(layers: Sequence[str]) -> ModelError | BlindLayerError:
    """Return the error for scores without a gradient: either grad mode is off, or there is no dependence."""
    return no_dependence_error(layers) if torch.is_grad_enabled() else grad_mode_off_error(layers)


def grad_mode_off_error(layers: Sequence[str]) -> ModelError:
    """Return the error for a model that turns grad mode off after a layer."""
    causes = "torch.no_grad or inference_mode in a forward method, a reentrant checkpoint around the layer"
    reason = f"the model, or the code that calls it, disables recording ({causes})"
    advice = "Turn recording on for the explanation, or choose a later layer."
    return ModelError(f"Gradient recording is off after layer {join_names(layers)}: {reason}. {advice}")


def no_dependence_error(layers: Sequence[str]) -> BlindLayerError:
    """Return the error for a score that does not depend on the layers."""
    reason = (
        f"The score does not depend on layer {join_names(layers)}: no recorded operation leads from the layer to the"
    )
    advice = "Choose a layer on the path to the score, and a score that is not detached from the model's output."
    return BlindLayerError(f"{reason} score. {advice}")


def no_floating_tensor_error(layers: Iterable[str]) -> LayerError:
    """Return the error for layers whose output contains no floating-point tensor."""
    advice = "choose a layer whose output contains such a tensor."
    return LayerError(f"Layer {join_names(layers)} returned no floating-point tensor: {advice}")
