"""From what a forward pass left to maps: derivatives on the grid, and methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradcam.attention.census import Census
from gradcam.effort import Effort
from gradcam.errors import TargetError
from gradcam.gradients import curvatures, jacobian
from gradcam.methods import Method
from gradcam.recording import Recorded
from gradcam.reshaping import Reshape
from gradcam.rounding import Settled, find_slack, settle_method, undoubted
from gradcam.scores import FINER_SHARE, difference, find_nearest
from gradcam.sites import Site, blind_layer, check_range, find_site
from gradcam.targets import RepeatedTarget, Scored

Values = dict[tuple[str, str], list[Settled]]  # by layer and method, pieces (N,k,...) along the classes


@dataclass(frozen=True)
class Maps:
    """What a method gave at a layer, values (N,K,...) of either sign in float32, and the scores (N,K) that it explained.

    `was_rounding`: where zeros have taken the place of rounding, (N,K,2), as in `Settled`; None where nowhere.
    """

    values: Tensor
    scores: Tensor
    was_rounding: Tensor | None = None


def compute_maps(
    recorded: Recorded, methods: Sequence[Method], effort: Effort, census: Census, reshape: Reshape = None
) -> dict[tuple[str, str], Maps]:
    """Maps by layer and method, the methods in their order; those of no layer have their `place` for one.

    `census`: of the attentions in the recorded pass, for methods that follow them.
    """
    sites = [find_site(layer, recorded, reshape) for layer in recorded.activations]
    scores = _scores_by_kind(recorded, methods)
    values: Values = {(site.layer, it.name): [] for site in sites for it in methods if it.place == "layer"}
    values |= {(it.place, it.name): [] for it in methods if it.place != "layer"}
    for method in methods:
        if method.needs == ("activations",):
            _use_activations(sites, method, recorded.scored.values.shape[1], values)
    _use_gradients(recorded, sites, [it for it in methods if it.needs == ("activations", "gradients")], scores, values)
    _use_curvatures(recorded, sites, [it for it in methods if "curvatures" in it.needs], values)
    _run_again(recorded, sites, [it for it in methods if not it.needs and it.place == "layer"], values, effort)
    _look_beside_layers(recorded, methods, values, effort, census)
    check_range(torch.cat(list(scores.values()), 1).detach(), "The scores are")
    kinds = {method.name: method.score for method in methods}
    return {key: _put_together(key, parts, scores[kinds[key[1]]]) for key, parts in values.items()}


def _put_together(key: tuple[str, str], parts: Sequence[Settled], scores: Tensor) -> Maps:
    maps, was_rounding = torch.cat([it.maps for it in parts], 1), torch.cat([it.was_rounding for it in parts], 1)
    layer, name = key
    *_, any_was = check_range(maps, f"The {name} maps at layer '{layer}', in float32, are", was_rounding.any())
    return Maps(maps, scores.detach().float(), was_rounding if any_was else None)


def _use_activations(sites: Sequence[Site], method: Method, classes: int, values: Values) -> None:
    for site in sites:
        found = method.compute(site.grid).float()
        values[site.layer, method.name].append(undoubted(found[:, None].repeat_interleave(classes, 1)))


def _use_gradients(
    recorded: Recorded,
    sites: Sequence[Site],
    methods: Sequence[Method],
    scores: dict[str | None, Tensor],
    values: Values,
) -> None:
    """One backward pass for all kinds of scores, their classes one after another."""
    if not methods:
        return
    kinds = list(dict.fromkeys(method.score for method in methods))
    with torch.enable_grad():
        joined = torch.cat([scores[kind] for kind in kinds], 1)
    classes, slack = recorded.scored.values.shape[1], find_slack(recorded)
    seeing: set[tuple[str, str | None]] = set()  # layers and kinds of scores with a gradient
    first = 0
    for gradients in jacobian(joined, [site.recorded for site in sites], scaled=recorded.has_float16):
        for site, gradient in zip(sites, gradients):
            on_grid, is_zero = site.to_grid(gradient, "gradients")
            for kind in kinds:
                start = kinds.index(kind) * classes - first
                mine = on_grid[:, max(start, 0) : max(start + classes, 0)]
                if mine.shape[1] == 0:
                    continue
                if not is_zero and (len(kinds) == 1 or mine.any()):
                    seeing.add((site.layer, kind))
                for method in methods:
                    if method.score == kind:
                        found = settle_method(method.compute, slack, site.grid, mine)
                        values[site.layer, method.name].extend(each.float() for each in found)
        first += on_grid.shape[1]
    for site in sites:
        if any((site.layer, kind) not in seeing for kind in kinds):
            raise blind_layer(site, recorded.model)


def _use_curvatures(recorded: Recorded, sites: Sequence[Site], methods: Sequence[Method], values: Values) -> None:
    """Two backward passes for each class and layer."""
    if not methods:
        return
    slack = find_slack(recorded)
    for site in sites:
        is_blind = True
        for derivatives in curvatures(recorded.scored.values, site.recorded, scaled=recorded.has_float16):
            gradient, is_zero = site.to_grid(derivatives[0], "gradients")
            curvature, _ = site.to_grid(derivatives[1], "second derivatives")
            is_blind = is_blind and is_zero
            for method in methods:
                found = settle_method(method.compute, slack, site.grid, gradient, curvature)
                values[site.layer, method.name].extend(each.float() for each in found)
        if is_blind:
            raise blind_layer(site, recorded.model)


def _run_again(
    recorded: Recorded, sites: Sequence[Site], methods: Sequence[Method], values: Values, effort: Effort
) -> None:
    for method in methods:
        for site in sites:
            values[site.layer, method.name].append(method.compute(recorded, site, effort).float())


def _look_beside_layers(
    recorded: Recorded, methods: Sequence[Method], values: Values, effort: Effort, census: Census
) -> None:
    for method in methods:
        if method.place == "input":
            values["input", method.name].append(method.compute(recorded, effort).float())
        elif method.place == "attention":
            found = method.compute(recorded, census, effort).float()
            values["attention", method.name].append(undoubted(found))


def _scores_by_kind(recorded: Recorded, methods: Sequence[Method]) -> dict[str | None, Tensor]:
    """The scores (N,K) that were asked for, by None, and those that methods choose themselves, by their key."""
    scored = recorded.scored
    scores: dict[str | None, Tensor] = {None: scored.values}
    for method in methods:
        if method.score is None:
            continue
        if method.score not in scores:
            scores[method.score] = _finer_scores(method.name, recorded.scored)
    return scores


def _finer_scores(name: str, scored: Scored) -> Tensor:
    """Each class's logit against those nearest to it, of the same classes in all views of an image."""
    if scored.logits is None or scored.classes is None:
        raise TargetError(
            f"{name} compares classes with one another, and the target is a function: pass classes for a target."
        )
    target, views = scored.target, 1
    if isinstance(target, RepeatedTarget):
        target, views = target.target, target.blocks
    if target.score != "logit":
        raise TargetError(f"{name} explains a score of its own, and {target.score!r} is asked for: leave that out.")
    images = len(scored.logits) // views
    rivals = find_nearest(scored.logits[:images].detach(), scored.classes[:images]).repeat(views, 1, 1)
    with torch.enable_grad():
        return difference(scored.logits, scored.classes, rivals, FINER_SHARE)
