"""Compute perturbation methods slowly, one variant after another, without sharing code with the package."""

import copy
import math
from collections.abc import Callable

import cv2
import numpy as np
import torch
from torch import Tensor, nn


def without_in_place(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for module in model.modules():
        if getattr(module, "inplace", False):
            module.inplace = False
    return model


def layer_output(model: nn.Module, images: Tensor, layer: str) -> Tensor:
    activations = []
    model = without_in_place(model)
    model.get_submodule(layer).register_forward_hook(lambda module, args, output: activations.append(output.clone()))
    with torch.no_grad():
        model(images)
    return activations[0]


def scores_with(
    model: nn.Module, images: Tensor, layer: str, change: Callable[[Tensor], Tensor], score: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the scores after `change` is applied to the layer's output."""
    model = without_in_place(model)
    model.get_submodule(layer).register_forward_hook(lambda module, args, output: change(output.clone()))
    with torch.no_grad():
        return score(model(images))


def ablationcam(
    model: nn.Module, images: Tensor, layer: str, score: Callable[[Tensor], Tensor], axis: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the weights (N,K,C) and the layer's output: equations 4 and 5 of the paper, by a loop over the channels."""
    output = layer_output(model, images, layer)
    with torch.no_grad():
        y = score(model(images))
    weights = []
    for channel in range(output.shape[axis]):

        def ablate(activations: Tensor, channel: int = channel) -> Tensor:
            activations.select(axis, channel).zero_()
            return activations

        weights.append((y - scores_with(model, images, layer, ablate, score)) / y.abs())
    return torch.stack(weights, -1), output


def sum_of_channels(weights: Tensor, activations: Tensor) -> Tensor:
    """Combine weights (N,K,C) and activations (N,C,...) into positive maps (N,K,...), one product at a time."""
    maps = torch.zeros(*weights.shape[:2], *activations.shape[2:], dtype=torch.float64)
    for image in range(len(weights)):
        for k in range(weights.shape[1]):
            for channel in range(weights.shape[2]):
                maps[image, k] += weights[image, k, channel].item() * activations[image, channel].double()
    return maps.clamp(min=0)


def window(place: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
    """Return Recipro-CAM's window around a cell: 1/4 there, half of it for each step to a neighbour, and zero elsewhere."""
    values = torch.zeros(lengths, dtype=torch.float64)
    for cell in np.ndindex(*lengths):
        steps = [abs(coordinate - centre) for coordinate, centre in zip(cell, place)]
        if max(steps) <= 1:
            values[cell] = math.prod(0.25 if step else 0.5 for step in steps)
    return values


def reciprocam(
    model: nn.Module, images: Tensor, layer: str, score: Callable[[Tensor], Tensor], lengths: tuple[int, ...]
) -> Tensor:
    """Return the scores (N,K,...) of each window minus those of zeros; activations are (N,C,...)."""
    nothing = scores_with(model, images, layer, lambda activations: activations * 0, score)
    maps = torch.zeros(*nothing.shape, *lengths, dtype=torch.float64)
    for place in np.ndindex(*lengths):
        weights = window(place, lengths)
        scores = scores_with(model, images, layer, lambda values, weights=weights: values * weights.to(values), score)
        maps[(slice(None), slice(None), *place)] = (scores - nothing).double()
    return maps


def enlarge(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return cv2.resize(values.astype(np.float64), size[::-1], interpolation=cv2.INTER_LINEAR)


def scorecam_weights(
    model: nn.Module,
    images: Tensor,
    layer: str,
    classes: list[list[int]],
    *,
    masks_of: Callable[[np.ndarray, int], list[np.ndarray]] = lambda mask, rank: [mask],
    channels: Callable[[np.ndarray], list[int]] = lambda activations: list(range(len(activations))),
) -> tuple[Tensor, Tensor]:
    """Return Score-CAM's weights (N,K,C), algorithm 1 of the paper, image by image; and the layer's output.

    `masks_of(mask, rank)` returns the masks whose scores are averaged; `rank` is the channel's rank by variance.
    """
    output = layer_output(model, images, layer)
    rows = []
    for image, activations, image_classes in zip(images, output.numpy(), classes):
        ranks = list(np.argsort([-channel.var() for channel in activations], kind="stable"))
        exponentials: dict[int, Tensor] = {}
        with torch.no_grad():
            baseline = model(image[None] * 0)[0, image_classes]
        for channel in channels(activations):
            large = enlarge(activations[channel], tuple(image.shape[1:]))
            if large.max() == large.min():
                continue
            mask = (large - large.min()) / (large.max() - large.min())
            scores = []
            for item in masks_of(mask, ranks.index(channel)):
                with torch.no_grad():
                    scores.append(model(image[None] * torch.from_numpy(item).to(image))[0, image_classes])
            exponentials[channel] = (sum(scores) / len(scores) - baseline).exp()
        total = sum(exponentials.values())
        zero = torch.zeros_like(baseline)
        rows.append(torch.stack([exponentials.get(c, zero) / total for c in range(len(activations))], -1))
    return torch.stack(rows), output


def smooth_gradcam_pp(
    model: nn.Module, images: Tensor, layer: str, classes: list[int], *, samples: int, noise: float, seed: int
) -> Tensor:
    """Return Smooth Grad-CAM++ (equation 8 of the paper, with powers of the gradient), by loops."""
    plain = layer_output(model, images, layer)
    model = without_in_place(model)
    recorded: list[Tensor] = []

    def keep(module: nn.Module, args: object, output: Tensor) -> Tensor:
        recorded[:] = [output.detach().requires_grad_()]
        return recorded[0]

    model.get_submodule(layer).register_forward_hook(keep)
    maps = []
    for image, activations, index in zip(images, plain, classes):
        powers = [[], [], []]  # type: ignore[var-annotated]
        for sample in range(samples):
            drawn = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed + sample)).to(image)
            noisy = image + noise * (image.max() - image.min()) * drawn
            (gradient,) = torch.autograd.grad(model(noisy[None])[0, index], recorded[0])
            for power in range(3):
                powers[power].append(gradient[0] ** (power + 1))
        d1, d2, d3 = (sum(power) / samples for power in powers)
        weighted = torch.zeros(plain.shape[2:], dtype=torch.float64)
        for channel, a in enumerate(activations):
            weight = 0.0
            for cell in np.ndindex(*a.shape):
                below = 2 * d2[channel][cell].item() + a.sum().item() * d3[channel][cell].item()
                alpha = d2[channel][cell].item() / below if below else 0.0
                weight += alpha * max(d1[channel][cell].item(), 0.0)
            weighted += weight * a.double()
        maps.append(weighted.clamp(min=0))
    return torch.stack(maps)[:, None]
