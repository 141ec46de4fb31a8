"""Guided backpropagation, and its product with Grad-CAM."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradcam.attributions.base import Attribution, differentiable, fix_classes
from gradcam.cam.explain import explain
from gradcam.errors import ModelError
from gradcam.hooks import pytorch
from gradcam.hooks.autograd import list_graph_nodes
from gradcam.hooks.containers import to_batch
from gradcam.hooks.hooks import Hooks, refuse_vmap
from gradcam.targets.classes import is_function

# The autograd node of a hooked output. If the output is a view, the second entry is the autograd node of its base
# tensor.
GuidedOutput = tuple[Node, "Node | None"]


@contextlib.contextmanager
def guided(modules: Sequence[nn.Module]) -> Iterator[list[GuidedOutput]]:
    """Set negative gradients at the output of each ReLU module to zero, and yield a list of the hooked outputs.

    If an output is changed in place later, the hook still changes the gradient of the original value.
    """
    outputs: list[GuidedOutput] = []
    hooks = Hooks()

    def clamp_gradient(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, Tensor):
            refuse_vmap(output)
            if output.requires_grad:
                hooks.at_gradient(output, lambda gradient: gradient.clamp(min=0))
            if output.grad_fn is not None:
                base = pytorch.get_view_base(output)
                outputs.append((output.grad_fn, None if base is None else base.grad_fn))

    with hooks:
        for module in modules:
            # An nn.Hardtanh with minimum 0 is a capped ReLU. nn.ReLU6 is a subclass of nn.Hardtanh.
            if isinstance(module, nn.ReLU) or (isinstance(module, nn.Hardtanh) and module.min_val == 0):
                hooks.after_forward(module, clamp_gradient)
        yield outputs


def require_all_relus_hooked(scores: Tensor, model_input: Tensor, outputs: Sequence[GuidedOutput]) -> None:
    """Raise `ModelError` if a ReLU between the model's input and the scores was not hooked, or if there is no ReLU."""
    users = _nodes_between(scores, model_input)
    hooked = {node for node, _ in outputs} & users.keys()
    # If an output is a view, its hook changes only the gradient through this view. The node of the base tensor
    # therefore counts as hooked only if its entire gradient comes through hooked views.
    hooked |= {base_node for _, base_node in outputs if base_node in users and users[base_node] <= hooked}
    unhooked = sum(pytorch.is_relu(node) for node in users.keys() - hooked)
    opaque = sum(map(pytorch.is_opaque, users))
    if unhooked:
        raise ModelError(
            f"Guided backpropagation must change the gradient at every ReLU, but hooks cannot reach {unhooked} of "
            "this model's ReLUs. These ReLUs are called as functions (F.relu, torch.relu, clamp(min=0)), or their outputs "
            "are changed in place. Replace each by an nn.ReLU module that the model calls, or use another method, such as "
            "smoothgrad."
        )
    if opaque:
        problem = f"{opaque} part(s) of the model run as scripted or compiled code, so hooks cannot reach their ReLUs"
        raise ModelError(f"{problem}: use the original Python modules, or another method, such as smoothgrad.")
    if not hooked:
        raise ModelError(
            "There is no ReLU between the images and the score, so guided backpropagation equals the plain gradient: use "
            "input_gradients, or smoothgrad."
        )


def _nodes_between(scores: Tensor, model_input: Tensor) -> dict[Node, set[Node]]:
    """Return all autograd nodes between the model's input and the scores, each with the nodes that use its output."""
    if model_input.grad_fn is None:
        return {}
    users: dict[Node | None, set[Node]] = defaultdict(set)
    for node in list_graph_nodes(scores):
        for predecessor, _ in node.next_functions:
            users[predecessor].add(node)
    reached, pending = {model_input.grad_fn}, [model_input.grad_fn]
    while pending:
        new = users[pending.pop()] - reached
        reached |= new
        pending.extend(new)
    return {node: users[node] for node in reached}


def guided_backpropagation(model: nn.Module, images: Any, *, target: Any = None) -> Attribution:
    """Compute the gradient at the image, with only positive gradients passed back at every ReLU.

    The result shows fine detail, but hardly depends on the class. The result may be zero everywhere. Hooks cover
    `nn.ReLU`, `nn.ReLU6`, their subclasses, and `nn.Hardtanh` with minimum 0. These modules may work in place, and may
    run several times. Other nonlinearities keep their gradient.

    Parameters
    ----------
    model : nn.Module
        As in `gradcam.explain`.
    images : Tensor (N,C,H,W) or (N,C,D,H,W), tuple or dict
        As in `gradcam.explain`.
    target : Any, default None
        As in `gradcam.explain`.

    Returns
    -------
    Attribution
        Signed values (N,K,C,H,W).

    Raises
    ------
    ModelError
        If there is no ReLU between the image and the score, or if hooks do not reach a ReLU (F.relu, torch.relu,
        clamp(min=0), clamp(0, 6) or F.threshold at 0). Code such as `x * (x > 0)` is not recognised as a ReLU, so it
        raises no error.
    GradcamError
        As in `input_gradients`.

    Examples
    --------
    >>> import gradcam
    >>> classifier = gradcam.load_classifier()
    >>> attribution = gradcam.attributions.guided_backpropagation(classifier.model, classifier.batch(["photo.jpg"]))
    >>> attribution.method
    'guided-backprop'

    References
    ----------
    Springenberg et al., "Striving for Simplicity", ICLR Workshops 2015, section 3.4; Adebayo et al., "Sanity Checks for
    Saliency Maps", NeurIPS 2018, for how little the result depends on the class.
    """
    with differentiable(model, images, target) as subject, guided(subject.modules) as outputs:
        run = subject.run(subject.images, subject.target)
        if run.scores.requires_grad:
            require_all_relus_hooked(run.scores, run.model_input, outputs)
        return subject.attribution(run, subject.gradients(run), "guided-backprop")


def guided_gradcam(
    model: nn.Module, images: Any, layer: str | nn.Module | None = None, *, target: Any = None, reshape: Any = None
) -> Attribution:
    """Multiply guided backpropagation by the Grad-CAM heatmap, which makes the fine detail class-specific.

    Parameters
    ----------
    model : nn.Module
        As in `gradcam.explain`.
    images : Tensor (N,C,H,W) or (N,C,D,H,W), tuple or dict
        As in `gradcam.explain`.
    layer : str or nn.Module, default None
        The target layer of the heatmap, as in `gradcam.explain`.
    target : Any, default None
        As in `gradcam.explain`.
    reshape : tuple, str or callable, default None
        As in `gradcam.explain`.

    Returns
    -------
    Attribution
        Signed values (N,K,C,H,W).

    Raises
    ------
    GradcamError
        As in `gradcam.explain` and `guided_backpropagation`.

    Examples
    --------
    >>> import gradcam
    >>> classifier = gradcam.load_classifier()
    >>> images = classifier.batch(["photo.jpg"])
    >>> gradcam.attributions.guided_gradcam(classifier.model, images, "layer4", target=967).values.shape
    torch.Size([1, 1, 3, 224, 224])

    References
    ----------
    Selvaraju et al., "Grad-CAM", ICCV 2017, section 3.2.
    """
    fine = guided_backpropagation(model, images, target=target)
    copies = to_batch(images).copy()  # The model may change its input in place.
    fixed_target = target if is_function(target) or fine.classes is None else fix_classes(target, fine.classes)
    coarse = explain(model, copies, layer, target=fixed_target, reshape=reshape)
    return replace(fine, values=fine.values * coarse.heatmaps[:, :, None], method="guided-gradcam", layer=coarse.layer)
