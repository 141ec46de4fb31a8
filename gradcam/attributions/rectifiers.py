"""Guided ReLUs: hooks that let only positive gradients through, and what they cannot reach."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradcam.errors import ModelError
from gradcam.hooks import Hooks
from gradcam.target_layer import refuse_vmap

# What autograd calls an operation's derivative, and what is zero where the operation is a ReLU. A clamp between 0 and
# anything but 6 is left out: that is how values are kept in range, and no activation.
RELU_NODES = {
    "ReluBackward": (),
    "HardtanhBackward": ("_saved_min_val",),
    "ThresholdBackward": ("_saved_threshold",),
    "ClampMinBackward": ("_saved_min",),
    "ClampBackward": ("_saved_min",),
}
# Parts of a graph that hide what is in them.
OPAQUE_NODES = ("DifferentiableGraphBackward", "CompiledFunctionBackward")


@dataclass(frozen=True)
class GuidedOutput:
    """What autograd knows of a hooked output: its node, and, where that is a view changed in place, the whole's."""

    node: Node
    whole: Node | None


@contextlib.contextmanager
def guided(modules: Sequence[nn.Module]) -> Iterator[list[GuidedOutput]]:
    """Each ReLU module's gradient is cut off below zero where it comes in; the outputs that this was done to.

    Values stay as they are, and so do the tensors: a gradient hook on an output sees the gradient of the value that
    it had then, whatever is done to the tensor in place later on.
    """
    outputs: list[GuidedOutput] = []
    hooks = Hooks()

    def guide(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        refuse_vmap(output)
        if output.requires_grad:
            hooks.at_gradient(output, _positive_part)
            if output.grad_fn is not None:
                whole = output._base.grad_fn if output._base is not None else None
                outputs.append(GuidedOutput(output.grad_fn, whole))

    with hooks:
        for module in modules:
            if _is_relu_module(module):
                hooks.after_forward(module, guide)
        yield outputs


def _positive_part(gradient: Tensor) -> Tensor:
    return gradient.clamp(min=0)


def _is_relu_module(module: nn.Module) -> bool:
    """ReLU6 is a kind of Hardtanh, which may be a ReLU6 under another name."""
    return isinstance(module, nn.ReLU) or (isinstance(module, nn.Hardtanh) and module.min_val == 0)


def require_all_guided(scores: Tensor, entrance: Tensor, outputs: Sequence[GuidedOutput]) -> None:
    """Raises `ModelError` where a ReLU between the pictures and the scores was not hooked, or there is none.

    `entrance`: the tensor that the model was given, of which the whole graph is made.
    """
    users = _nodes_between(scores, entrance)
    hooked = {output.node for output in outputs} & users.keys()
    # A gradient that comes to the whole by another way than through the view passes the view's hook by.
    hooked |= {output.whole for output in outputs if output.whole in users and users[output.whole] <= hooked}
    missed = [node for node in users if node not in hooked and _is_relu_node(node)]
    opaque = sum(any(name in node.name() for name in OPAQUE_NODES) for node in users)
    if missed:
        raise ModelError(
            f"Guided backpropagation has to change the gradient at every ReLU, and hooks cannot reach {len(missed)} of this "
            "model's: they are called as functions (F.relu, torch.relu, clamp(min=0)), or their outputs are changed by "
            "others. Make each an nn.ReLU module that the model calls, or take another method, such as smoothgrad."
        )
    if opaque:
        raise ModelError(
            f"{opaque} part(s) of the model run as scripted or compiled code, where hooks reach no ReLU: use the Python "
            "modules that they were made from, or another method, such as smoothgrad."
        )
    if not hooked:
        raise ModelError(
            "There is no ReLU between the images and the score, so that guided backpropagation is the plain gradient: "
            "use input_gradients, or smoothgrad."
        )


def _nodes_between(scores: Tensor, entrance: Tensor) -> dict[Node, set[Node]]:
    """The nodes on any way from the scores back to the entrance, each with those on it that use its value directly."""
    if scores.grad_fn is None or entrance.grad_fn is None:
        return {}
    users: dict[Node, set[Node]] = defaultdict(set)
    waiting = [scores.grad_fn]
    while waiting:
        node = waiting.pop()
        for used, _ in node.next_functions:
            if used is not None:
                if used not in users:
                    waiting.append(used)
                users[used].add(node)
    found = {entrance.grad_fn}
    waiting = [entrance.grad_fn]
    while waiting:
        new = users[waiting.pop()] - found
        found |= new
        waiting.extend(new)
    return {node: users[node] for node in found}


def _is_relu_node(node: Node) -> bool:
    is_of_view = "CopySlices" in node.name()  # of an operation in place on a view
    if is_of_view and not hasattr(node, "_wrapped_node"):
        return True  # older releases of PyTorch do not say which it is: better refused than wrong
    node = getattr(node, "_wrapped_node", node)
    name = node.name().rstrip("0123456789")
    if name not in RELU_NODES:
        return False
    zeros = [getattr(node, attribute) for attribute in RELU_NODES[name]]
    largest = getattr(node, "_saved_max", None)
    is_range = name == "ClampBackward" and largest not in (None, 6)
    return not is_range and all(isinstance(value, (int, float)) and value == 0 for value in zeros)
