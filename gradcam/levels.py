"""Several levels as one: of several tensors that a layer gives those to be explained, and maps of several grids added."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

from torch import Tensor

from gradcam.errors import LayerError
from gradcam.gradients import no_dependence, reached
from gradcam.heatmap import resize
from gradcam.recording import Recorded
from gradcam.reshaping import Reshape
from gradcam.sites import Site, find_site

JOINS = ("sum",)


def choose_sites(recorded: Recorded, reshape: Reshape = None, *, join: str | None = None) -> dict[str, list[Site]]:
    """For each layer the sites to be explained: one, or all levels of a pyramid; with `join` those of all layers as one.

    Of several tensors that a layer gave these are the ones that have a grid and that the score depends on. All of them
    if no two have the same grid, as the levels of a pyramid do; else the first.
    Raises `LayerError` where there is none.
    """
    chosen = {layer: _choose(layer, names, recorded, reshape) for layer, names in recorded.parts.items()}
    if join is None or not chosen:
        return chosen
    sites = {site.layer: site for site in itertools.chain.from_iterable(chosen.values())}  # each counts once
    return {" + ".join(chosen): list(sites.values())}


def _choose(layer: str, names: Sequence[str], recorded: Recorded, reshape: Reshape) -> list[Site]:
    if len(names) == 1:
        return [find_site(names[0], recorded, reshape)]
    on_the_way = reached(recorded.scored.values, [recorded.activations[name] for name in names])
    names = [name for name, is_reached in zip(names, on_the_way) if is_reached]
    if not names:
        raise no_dependence([layer])
    sites: list[Site] = []
    for name in names:
        with contextlib.suppress(LayerError):
            sites.append(find_site(name, recorded, reshape))
    if not sites:
        return [find_site(names[0], recorded, reshape)]  # which says why there is no grid
    is_pyramid = len({site.grid.shape[2:] for site in sites}) == len(sites)
    return sites if is_pyramid else sites[:1]


def add_levels(maps: Sequence[Tensor], *, signed: bool) -> Tensor:
    """Raw maps (N,K,h,w) of several grids, resized to the finest and added; one alone stays as it is."""
    finest = max((each.shape[2:] for each in maps), key=lambda grid: grid.numel())
    total, *others = [each if each.shape[2:] == finest else resize(each, finest, signed=signed) for each in maps]
    for other in others:
        total = total + other
    return total
