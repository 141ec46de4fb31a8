"""Compute second derivatives of scores with respect to a layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradcam.errors import ModelError
from gradcam.hooks import pytorch
from gradcam.hooks.autograd import HALF_PRECISION_SCALES, _are_finite, _gradients, list_graph_nodes


def hessian_products(scores: Tensor, activations: Tensor, *, scaled: bool) -> Iterator[tuple[Tensor | None, ...]]:
    """Yield each class's gradient g at the activations A, and the Hessian-vector product H A, both (1,N,...).

    H A is the derivative of g·A, with A held constant in the product. If the score does not depend on the activations,
    g and H A are None. If the score is linear after the layer, H A is zero. `scaled` is as in `jacobian`.
    """
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
        # An autograd function written in Python may return a gradient that cannot be differentiated again. Sometimes
        # the gradient's graph contains an error node, but often the graph does not show the problem. PyTorch's module
        # hooks do not change the gradient, so `is_python_function` excludes them.
        python_nodes = [node for node in list_graph_nodes(value) if pytorch.is_python_function(node)]
        if python_nodes or any(map(pytorch.is_error_node, list_graph_nodes(gradient))):
            name = pytorch.get_function_name(python_nodes[0]) if python_nodes else "a function written in Python"
            reason = f"After the layer there is {name}, whose gradient cannot be differentiated again"
            advice = "choose a method that needs only the first derivative, such as 'gradcam', or a layer after that"
            raise ModelError(f"{reason}: {advice} operation.")
        product = torch.zeros_like(gradient)
    if scale != 1:
        gradient, product = gradient.float() / scale, product.float() / scale
    return gradient.detach(), product
