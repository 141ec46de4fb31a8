"""Explain with several layers and methods at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from typing_extensions import Unpack

from gradcam.cam.explain import Explanation, Plan, execute_plan
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import find_methods
from gradcam.layers.find import check_layers
from gradcam.options import ExplainOptions


def compare(
    model: nn.Module,
    images: Any,
    *,
    layers: Sequence[str | nn.Module],
    methods: Iterable[str | Method],
    target: Any = None,
    **options: Unpack[ExplainOptions],
) -> dict[tuple[str, str], Explanation]:
    """Compute heatmaps for several layers and methods, in one forward and one backward pass.

    Shapley-CAM takes two more backward passes per class and layer. Methods that perturb a layer's activations repeat
    their passes for each layer.

    Parameters
    ----------
    model : nn.Module
        As in `explain`.
    images : Tensor (N,C,H,W) or (N,C,D,H,W), tuple or dict
        As in `explain`.
    layers : sequence of str or nn.Module
        The names or modules of the layers. Methods that need no layer ignore this list. With `join="sum"`, the maps of
        all layers are added.
    methods : iterable of str or Method
        Keys or values of `gradcam.METHODS`.
    target : Any, default None
        As in `explain`.
    **options : Any
        The options of `explain`.

    Returns
    -------
    dict of (str, str) to Explanation
        The explanations. Each key is a pair: (layer name, method name). The key of RISE is ("input", "rise"), and the key
        of an attention method is ("attention", name). Joined layers have a name such as "layer3 + layer4". If the
        gradient at a layer is zero, the layer's maps are blank, and a warning reports the layer.

    Raises
    ------
    GradcamError
        As in `explain`.

    Examples
    --------
    >>> import gradcam, torch, torchvision
    >>> model = torchvision.models.resnet18(weights=None).eval()
    >>> explanations = gradcam.compare(
    ...     model, torch.rand(1, 3, 64, 64), layers=["layer3", "layer4"], methods=["gradcam", "layercam"]
    ... )
    >>> [f"{method} at {layer}" for layer, method in explanations]
    ['gradcam at layer3', 'layercam at layer3', 'gradcam at layer4', 'layercam at layer4']
    """
    plan = Plan.of(find_methods(methods), target, options, "compare")
    if plan.needs_layers:
        check_layers(layers)
    return execute_plan(model, images, layers, plan)
