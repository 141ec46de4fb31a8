"""Record a graph that starts at the images, or stop recording after the target layers."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from gradcam.hooks.autograd import Edge, get_edge
from gradcam.hooks.containers import Batch, version_of
from gradcam.hooks.hooks import Hooks, TargetLayer, grad_mode_off


@contextlib.contextmanager
def record_from_images(batch: Batch, layers: Collection[nn.Module]) -> Iterator[tuple[Batch, Edge | None]]:
    """Record a graph that starts at the images; yield the batch to run, and the edge where its images enter the graph.

    Tensors are saved for backward only after one of the modules `layers` has run. If `layers` is empty, no tensors are
    saved.
    """
    saves = False

    def pack(tensor: Tensor) -> tuple[Tensor, int] | None:
        if saves and tensor.is_inference():
            # With saved-tensor hooks, PyTorch itself does not raise this error.
            raise RuntimeError("Inference tensors cannot be saved for backward.")
        # Detach the tensor, because a node that held its own output would never be freed.
        return (tensor.detach(), version_of(tensor)) if saves else None

    def unpack(packed: tuple[Tensor, int]) -> Tensor:
        tensor, version = packed
        if version_of(tensor) != version:  # With saved-tensor hooks, PyTorch does not compare versions.
            raise RuntimeError("a saved tensor has been modified by an inplace operation")
        return tensor

    def start_saving(*_: object) -> None:
        nonlocal saves
        saves = True

    with Hooks() as hooks, torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        for module in layers:
            hooks.after_forward(module, start_saving)
        torch.set_grad_enabled(True)  # The contexts of the target layers restore grad mode.
        images = batch.pictures.requires_grad_().clone()  # Clone, because the model may change the tensor in place.
        yield batch.copy(lambda tensor: tensor, pictures=images), get_edge(images)


@contextlib.contextmanager
def turn_off_after_layers(recorders: Mapping[nn.Module, TargetLayer]) -> Iterator[None]:
    """Turn grad mode off after each target layer, because the layer's hook turns grad mode on.

    If a layer has several output tensors, grad mode stays on after the layer. The graph then shows on which of these
    tensors the score depends.
    """

    def turn_off(module: nn.Module, *_: object) -> None:
        if not recorders[module].has_several_outputs:
            torch.set_grad_enabled(False)

    with grad_mode_off(), Hooks() as hooks:
        for layer in recorders:
            hooks.after_forward(layer, turn_off)
        yield
