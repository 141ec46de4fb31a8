"""Whether a map changes when the network forgets what it has learnt: weights drawn anew, from the top down."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradcam.errors import BlindLayerError, GradcamError, ModelError, describe_unexpected, shorten, show_fields
from gradcam.evaluation.explainers import Explain, run_explain
from gradcam.evaluation.heatmaps import check_heatmaps, to_tensor
from gradcam.evaluation.ranks import rank_correlation
from gradcam.evaluation.seeds import draw
from gradcam.evaluation.subject import Subject
from gradcam.hooks import Hooks
from gradcam.isolation import undisturbed


@dataclass(frozen=True)
class Randomisation:
    """Maps of a network whose weights are drawn anew down to each of L layers, and how alike they are to those before.

    `layers`: dotted names, from the top down; at each, its weights and those of all that run after it are drawn anew.
    `correlations`: float32 (N,L), rank correlation with the maps of the network as it is. `heatmaps`: float32 (N,L,H,W).
    """

    layers: tuple[str, ...]
    correlations: Tensor
    heatmaps: Tensor = field(repr=False)

    __repr__ = show_fields


def randomisation(
    subject: Subject, explain: Explain, heatmaps: Any = None, *, stages: int = 8, seed: int = 0
) -> Randomisation:
    """Cascading randomisation (Adebayo et al., "Sanity Checks for Saliency Maps", NeurIPS 2018, section 4.1).

    A map that explains the model must change when the model's weights do: correlations near 0 are good, and 1 says that
    the map does not depend on the weights at all. `explain` makes heatmaps (N,H,W) from a model, images and classes;
    `heatmaps`, those of the model as it is, are made by it where they are not given.

    Weights are drawn anew on a copy of the model; the model itself is not touched. Each parameter's values are put into an
    order by chance, which keeps their scale: a network with weights of another scale may have no signal left, of which
    every map is blank. Statistics of batch norms stay. Layers are those that own parameters, in the reverse of the order in
    which they start; `stages` of them are looked at, the topmost one, the last, where all weights are drawn, and between
    these about as many layers from one to the next. The classes are those of the subject.
    A map that cannot be had at such a network, because its gradient is zero or its numbers overflow, counts as blank, and
    a blank map's correlation is as `rank_correlation` has it.

    Raises `ModelError` for a model without parameters, or that cannot be copied; `GradcamError` for `stages` below 1;
    `ImageError` for heatmaps of another form.
    """
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise GradcamError(f"stages is {shorten(stages)}, expected how many layers to look at, 1 or more.")
    made = run_explain(explain, subject.model, subject.images, subject.classes) if heatmaps is None else heatmaps
    before = check_heatmaps(made, subject.size, subject.images.device)
    model = _copy(subject.model)
    found = []
    layers = []
    for name in _draw_anew(model, subject.images[:1], stages, seed):
        layers.append(name)
        found.append(_explain_blankly(subject, explain, model))
    correlations = torch.stack([rank_correlation(before, maps) for maps in found], 1)
    return Randomisation(tuple(layers), correlations, torch.stack(found, 1))


def _draw_anew(model: nn.Module, images: Tensor, stages: int, seed: int) -> Iterator[str]:
    """Draw the weights of the model, which is changed, from the top down; at each stage the name of the layer it reached."""
    layers = _find_layers(model, images)
    if not layers:
        raise ModelError(f"{type(model).__name__} has no parameters: there is nothing that could be drawn anew.")
    ends = _divide(len(layers), stages)
    drawn: set[Tensor] = set()
    for number, (name, parameters) in enumerate(layers, start=1):
        for parameter_name, parameter in parameters:
            if parameter not in drawn:  # tied ones are drawn once
                _shuffle(parameter, draw(seed, "weights", parameter_name))
                drawn.add(parameter)
        if number in ends:
            yield name


def _divide(layers: int, stages: int) -> set[int]:
    """After how many of the layers to stop: 1 and all of them, and evenly between."""
    if stages == 1:
        return {layers}
    return {1 + round(stage * (layers - 1) / (stages - 1)) for stage in range(stages)}


def _shuffle(parameter: Tensor, generator: torch.Generator) -> None:
    order = torch.randperm(parameter.numel(), generator=generator, dtype=torch.int64, device="cpu").to(parameter.device)
    with torch.no_grad():
        parameter.copy_(parameter.flatten()[order].reshape(parameter.shape))


def _find_layers(model: nn.Module, images: Tensor) -> list[tuple[str, list[tuple[str, Tensor]]]]:
    """Modules that own parameters, the last to start first, each with these and their names.

    Parameters of a module that is never called, since another one computes with them, are the one's around it.
    """
    starts: dict[str, int] = {}

    with torch.no_grad(), Hooks() as hooks, undisturbed(model):
        for name, module in model.named_modules():
            hooks.before_forward(module, lambda *_, name=name: starts.__setitem__(name, len(starts)))
        model(images)
    owners: dict[str, list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):  # of tied ones all owners
        owner = name.rpartition(".")[0]
        while owner and owner not in starts:
            owner = owner.rpartition(".")[0]
        owners.setdefault(owner, []).append((name, parameter))
    return sorted(owners.items(), key=lambda item: -starts[item[0]])


def _explain_blankly(subject: Subject, explain: Explain, model: nn.Module) -> Tensor:
    """The maps of a model whose weights are drawn anew; blank where it has none."""
    try:
        found = run_explain(explain, model, subject.images, subject.classes)
    except BlindLayerError:
        return torch.zeros(subject.size, dtype=torch.float32, device=subject.images.device)
    return check_heatmaps(to_tensor(found).nan_to_num(0, 0, 0), subject.size, subject.images.device)


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied, and its weights are drawn anew on a copy alone: "
            f"{describe_unexpected(error)}"
        ) from error
