"""Grad-CAM of other libraries and by hand, as functions of the model, the images and the classes.

All functions explain the last convolution of a VGG, which a ReLU overwrites in place, and return the rectified maps
(N,h,w) at the layer's resolution. `resize` makes such a function usable as `method=` of `gradcam.evaluation.check`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Explain = Callable[[nn.Module, Tensor, Tensor], Tensor]


def find_last_convolution(model: nn.Module) -> str:
    """Return the name of the model's last convolution."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)][-1]


def explain_by_hand(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """Compute Grad-CAM with autograd alone. The hook returns a copy, so the ReLU cannot overwrite the activations."""
    activations: list[Tensor] = []

    def record(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        activations.append(output.detach().clone().requires_grad_())
        return activations[0].clone()

    handle = model.get_submodule(find_last_convolution(model)).register_forward_hook(record)
    try:
        with torch.enable_grad():
            scores = model(images).gather(1, classes[:, None]).sum()
            (gradient,) = torch.autograd.grad(scores, activations[0])
    finally:
        handle.remove()
    weights = gradient.mean((2, 3), keepdim=True)
    return (weights * activations[0].detach()).sum(1).relu()


def explain_with_pytorch_grad_cam(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    with GradCAM(model, [model.get_submodule(find_last_convolution(model))]) as cam:
        cam.get_target_width_height = lambda images: None  # no resizing
        targets = [ClassifierOutputTarget(index) for index in classes.tolist()]
        return torch.as_tensor(cam(images.clone().requires_grad_(), targets=targets))


def explain_with_torchcam(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    from torchcam.methods import GradCAM

    with GradCAM(model, find_last_convolution(model)) as cam:
        return cam(classes.tolist(), model(images.clone().requires_grad_()))[0].detach()


def explain_with_captum(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    from captum.attr import LayerGradCam

    cam = LayerGradCam(model, model.get_submodule(find_last_convolution(model)))
    return cam.attribute(images.clone().requires_grad_(), target=classes).detach()[:, 0].relu()


PEERS: dict[str, Explain] = {
    "pytorch-grad-cam": explain_with_pytorch_grad_cam,
    "torchcam": explain_with_torchcam,
    "captum": explain_with_captum,
}


def resize(explain: Explain) -> Explain:
    """Return a function whose maps have the size of the images, by bicubic interpolation."""

    def explain_at_image_size(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        maps = explain(model, images, classes)[:, None]
        return F.interpolate(maps, images.shape[-2:], mode="bicubic", align_corners=False)[:, 0].clamp(min=0)

    return explain_at_image_size


def scale_to_one(maps: Tensor) -> Tensor:
    """Divide each map (N,h,w) by its maximum. Maps of zeros stay as they are."""
    maximum = maps.amax((1, 2), keepdim=True)
    return maps / torch.where(maximum > 0, maximum, 1.0)
