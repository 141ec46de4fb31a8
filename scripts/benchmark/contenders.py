"""The contenders: gradcam, other libraries, and baselines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmark.cases import Case

Call = Callable[[], object]


@contextlib.contextmanager
def attach_bare(case: Case) -> Iterator[Call]:
    def forward() -> object:
        with torch.no_grad():
            return case.model(case.images)

    yield forward


@contextlib.contextmanager
def attach_by_hand(case: Case) -> Iterator[Call]:
    """Attach handwritten Grad-CAM for activations (N,C,h,w). Autograd records only layers after the target layer."""
    layer, recorded = case.model.get_submodule(case.layer), {}

    def record(module: nn.Module, args: object, output: Tensor) -> Tensor:
        recorded["activations"] = output.detach().requires_grad_()
        torch.set_grad_enabled(True)
        return recorded["activations"].clone()

    def explain() -> object:
        with torch.no_grad():
            handle = layer.register_forward_hook(record)
            output = case.model(case.images)
            handle.remove()
            scores = output.gather(1, torch.tensor(case.classes, device=output.device)).sum(0)
            directions = torch.eye(len(scores), device=output.device)
            activations = recorded["activations"]
            (gradients,) = torch.autograd.grad(scores, activations, grad_outputs=directions, is_grads_batched=True)
            torch.set_grad_enabled(False)
            maps = torch.einsum("knc,nchw->nkhw", gradients.mean((3, 4)), activations.detach()).relu_()
            heatmaps = nn.functional.interpolate(maps, case.images.shape[2:], mode="bicubic").clamp_(min=0)
            return heatmaps / heatmaps.amax((2, 3), keepdim=True).clamp_(min=1e-30)

    yield explain


@contextlib.contextmanager
def attach_hook(case: Case) -> Iterator[Call]:
    """Attach Grad-CAM for one class with a forward hook, as many notebooks do. Autograd records all layers."""
    layer, activations = case.model.get_submodule(case.layer), []
    classes = torch.tensor(case.classes, device=case.images.device)
    ((first, *_), *others) = case.classes

    def explain() -> object:
        handle = layer.register_forward_hook(lambda module, args, output: activations.append(output))
        output = case.model(case.images)
        handle.remove()
        activation = activations.pop()
        # For one image, a column of the output is faster than `gather`.
        scores = output.gather(1, classes) if others else output[:, first]
        (gradient,) = torch.autograd.grad(scores.sum(), activation)
        maps = (gradient.mean((2, 3), keepdim=True) * activation).sum(1, keepdim=True).relu().detach()
        heatmaps = nn.functional.interpolate(maps, case.images.shape[2:], mode="bicubic").clamp(min=0)
        return heatmaps / heatmaps.amax((2, 3), keepdim=True).clamp(min=1e-30)

    yield explain


@contextlib.contextmanager
def attach_gradcam(case: Case) -> Iterator[Call]:
    import gradcam

    yield lambda: gradcam.explain(case.model, case.images, case.layer, target=case.classes)


@contextlib.contextmanager
def attach_pytorch_grad_cam(case: Case) -> Iterator[Call]:
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    targets = [[ClassifierOutputTarget(index) for index in column] for column in case.columns]
    layers = [case.model.get_submodule(case.layer)]
    with GradCAM(model=case.model, target_layers=layers, reshape_transform=case.to_grid) as cam:
        yield lambda: [cam(input_tensor=case.images, targets=column) for column in targets]


@contextlib.contextmanager
def attach_torchcam(case: Case) -> Iterator[Call]:
    from torchcam.methods import GradCAM

    *columns, last = case.columns
    with GradCAM(case.model, case.layer) as cam:

        def explain() -> object:
            output = case.model(case.images)  # All classes share one forward pass.
            return [*(cam(column, output, retain_graph=True) for column in columns), cam(last, output)]

        yield explain


@contextlib.contextmanager
def attach_captum(case: Case) -> Iterator[Call]:
    from captum.attr import LayerGradCam

    targets = torch.tensor(case.columns, device=case.images.device)
    cam = LayerGradCam(case.model, case.model.get_submodule(case.layer))
    yield lambda: [cam.attribute(case.images, target=column) for column in targets]


@dataclass(frozen=True)
class Contender:
    attach: Callable[[Case], contextlib.AbstractContextManager[Call]]
    module: str
    distribution: str | None  # If this is None, the version is not reported.
    output_description: str


BARE, HOOK = "forward pass alone", "forward hook"


CONTENDERS = {
    BARE: Contender(attach_bare, "torch", None, "the model's output, under torch.no_grad()"),
    "by hand": Contender(attach_by_hand, "torch", None, "the same as gradcam; it checks and restores nothing"),
    "gradcam": Contender(
        attach_gradcam, "gradcam", None, "maps at the layer's resolution and heatmaps at the images' size, as tensors"
    ),
    "pytorch-grad-cam": Contender(
        attach_pytorch_grad_cam, "pytorch_grad_cam", "grad-cam", "heatmaps at the images' size, as NumPy arrays"
    ),
    "torchcam": Contender(
        attach_torchcam, "torchcam", "torchcam", "normalised maps at the layer's resolution; it does not resize them"
    ),
    "captum": Contender(
        attach_captum,
        "captum.attr",
        "captum",
        "signed maps at the layer's resolution; it does not clip, normalise or resize them",
    ),
}


def attach(name: str, case: Case) -> contextlib.AbstractContextManager[Call]:
    """Attach a contender by its name. The name `HOOK` is the forward hook, which is in some tables only."""
    return attach_hook(case) if name == HOOK else CONTENDERS[name].attach(case)
