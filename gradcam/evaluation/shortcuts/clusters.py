"""Clusters of explanations within each class, and how far other pictures have their like: NumPy and scikit-learn alone.

After spectral relevance analysis (Lapuschkin et al. 2019, "Unmasking Clever Hans predictors and assessing what machines
really learn"). New is how clusters are chosen. Pictures are joined two by two, the most alike first (average linkage), which
makes a tree of clusters of every size. Of those, the ones are taken whose place and look are rarest elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradcam.errors import GradcamError, to_pip_command
from gradcam.evaluation.intervals import bound_share

Array = NDArray[np.floating[Any]]

LEAST = 10  # pictures of a class that can be clustered
SMALLEST = 5  # pictures in a cluster
SHARE = 0.01  # of a class's pictures, that a cluster has at least
JOINED = 5000  # pictures of a class, which are joined by the distances of all pairs; of more, so many, evenly spread
MARGIN = 0.05  # of suspicion, by which a part has to be ahead of a cluster to stand in its place
MISFITS = 0.2  # of a cluster's members, which may have less in common with it than what is counted as its like
MOST = 0.5  # of a class's pictures: above it a cluster is what the class is about, and only its place can be suspicious
AT_ONCE = 250  # parts that are compared, of all pictures
Z = 1.645  # of the normal distribution: 95 % on one side
FLAT = 1e-6  # what values that differ for rounding alone do not exceed
TINY = float(np.finfo(np.float64).tiny)


def check_installed() -> None:
    """Raises `GradcamError` where scikit-learn is missing."""
    try:
        import sklearn.cluster  # noqa: F401
    except ImportError as error:
        raise GradcamError(f"Clustering needs scikit-learn ({error}): {to_pip_command('audit')}") from error


@dataclass(frozen=True, eq=False)
class Group:
    """A cluster of one class. `members`: positions of its pictures, the most typical first. `share`: of its class.
    `map`: (h,w), their mean map, whose sum is 1. `place`, `apart`: from 0 to 1, as `compare` has them. `elsewhere`: how many
    of the `others` pictures of other classes have as much evidence in its place as four of five members have. `is_rest`:
    whether it is what fits into no cluster of its class."""

    class_: int
    members: NDArray[np.intp]
    share: float
    map: Array
    place: float
    apart: float
    elsewhere: int
    others: int
    is_rest: bool = False

    @property
    def suspicion(self) -> float:
        """From 0 to 1. A part of a class that looks like nothing else has up to one half, and the more the rarer its place
        is in other classes; most of a class, or its rest, by place alone."""
        is_main = self.is_rest or self.share > MOST
        return self.apart * (self.place if is_main else (1 + self.place) / 2)


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is marked in N pictures: their classes (N,); `places` (N,h*w), each map with the sum 1; `looks` (N,C), the
    features of what is marked, with the length 1."""

    classes: NDArray[np.int64]
    grid: tuple[int, int]
    places: Array
    looks: Array

    @classmethod
    def of(cls, classes: NDArray[np.int64], maps: Array, features: Array) -> Evidence:
        """Of maps (N,h,w) without negative values, none of which is blank, and features (N,C)."""
        places = maps.reshape(len(maps), -1).astype(np.float64)
        grid = (int(maps.shape[1]), int(maps.shape[2]))
        return cls(classes, grid, places / places.sum(1, keepdims=True), _to_unit(features.astype(np.float64)))


def cluster(evidence: Evidence) -> list[Group]:
    """The clusters of all classes that have `LEAST` pictures, the most suspicious first; there are two classes or more."""
    groups = [
        group
        for class_, count in zip(*np.unique(evidence.classes, return_counts=True))
        if count >= LEAST
        for group in _cluster_class(evidence, np.flatnonzero(evidence.classes == class_))
    ]
    return sorted(groups, key=lambda group: (-group.suspicion, -len(group.members), group.class_))


def _cluster_class(evidence: Evidence, own: NDArray[np.intp]) -> Iterator[Group]:
    """Of a class's pictures, by their positions: no picture is in two clusters, and what is in none is the rest."""
    tried = own[:: -(-len(own) // JOINED)]
    # Of shares, the square root: its distances are Hellinger's, which small shares have a part in.
    points = np.concatenate([_scale(np.sqrt(evidence.places[tried])), _scale(evidence.looks[tried])], 1)
    pairs, order, slices = _join(points)
    least = max(SMALLEST, round(SHARE * len(tried)))
    large = [node for node, part in enumerate(slices) if part.stop - part.start >= least]
    groups = dict(zip(large, compare(evidence, [tried[order[slices[node]]] for node in large])))
    best: dict[int, tuple[float, list[int]]] = {}
    for node in large:  # parts come before what they are parts of
        parts = [best[part] for part in pairs[node - len(tried)] if part in best]
        highest = max((suspicion for suspicion, _ in parts), default=0.0)
        is_whole = groups[node].suspicion >= highest - MARGIN
        best[node] = (
            (groups[node].suspicion, [node]) if is_whole else (highest, [it for _, them in parts for it in them])
        )
    _, chosen = best[large[-1]]
    for node in chosen:
        inside = order[slices[node]]
        distances = np.linalg.norm(points[inside] - points[inside].mean(0), axis=1)
        yield replace(groups[node], members=tried[inside[np.argsort(distances, kind="stable")]])
    rest = np.setdiff1d(own, np.concatenate([groups[node].members for node in chosen]))
    if len(rest):
        yield replace(compare(evidence, [rest])[0], is_rest=True)


def _scale(values: Array) -> Array:
    """Values (N,P) around their mean, so that the mean of their squared lengths is 1; zeros where all are alike."""
    if np.ptp(values, axis=0).max() < FLAT:
        return np.zeros((len(values), 1))
    found: Array = values - values.mean(0)
    return found / max(float(np.sqrt((found**2).sum(1).mean())), TINY)


def _join(points: Array) -> tuple[NDArray[np.intp], NDArray[np.intp], list[slice]]:
    """A tree over points: the two parts of each of its nodes, which are numbered on from the points'; and an order of the
    points in which each node is a slice, that of all the last."""
    from sklearn.cluster import AgglomerativeClustering

    tree = AgglomerativeClustering(n_clusters=None, distance_threshold=0, linkage="average").fit(points)
    pairs: NDArray[np.intp] = tree.children_
    sizes = [1] * len(points)
    for one, other in pairs:
        sizes.append(sizes[one] + sizes[other])
    starts = [0] * len(sizes)
    for node in range(len(sizes) - 1, len(points) - 1, -1):
        one, other = pairs[node - len(points)]
        starts[one], starts[other] = starts[node], starts[node] + sizes[one]
    order = np.argsort(starts[: len(points)])
    return pairs, order, [slice(start, start + size) for start, size in zip(starts, sizes)]


def compare(evidence: Evidence, parts: Sequence[NDArray[np.intp]]) -> list[Group]:
    """How rare what pictures of one class have in common is elsewhere, for several parts of that class.

    `place`: how much rarer, among pictures of other classes than among those of this one, is as much evidence in the
    part's place as four of five of its members have. `apart`: how much rarer, among all pictures outside of the part than
    in it, is what looks as much like its members as four of five do; a member is compared with the others."""
    return [it for first in range(0, len(parts), AT_ONCE) for it in _compare(evidence, parts[first : first + AT_ONCE])]


def _compare(evidence: Evidence, parts: Sequence[NDArray[np.intp]]) -> Iterator[Group]:
    is_own = evidence.classes == evidence.classes[parts[0][0]]
    means = [evidence.places[members].mean(0) for members in parts]
    amounts = evidence.places @ np.stack([_mark_core(mean) for mean in means], 1)
    totals = np.stack([evidence.looks[members].sum(0) for members in parts])
    likenesses = evidence.looks @ _to_unit(totals).T
    for members, mean, amount, total, likeness in zip(parts, means, amounts.T, totals, likenesses.T):
        own_looks = evidence.looks[members]
        likeness[members] = (own_looks * _to_unit(total - own_looks)).sum(1)
        is_there, is_alike = (
            each >= np.quantile(each[members], MISFITS, method="lower") for each in (amount, likeness)
        )
        is_inside = np.zeros(len(is_own), bool)
        is_inside[members] = True
        yield Group(
            class_=int(evidence.classes[members[0]]),
            members=members,
            share=len(members) / int(is_own.sum()),
            map=mean.reshape(evidence.grid),
            place=how_much_rarer(is_there[~is_own], is_there[is_own]),
            apart=how_much_rarer(is_alike[~is_inside], is_alike[is_inside]),
            elsewhere=int(is_there[~is_own].sum()),
            others=int((~is_own).sum()),
        )


def _mark_core(mean: Array) -> Array:
    """One for the fewest cells that have half of a map, and zero for the others."""
    order = np.argsort(-mean, kind="stable")
    marked = np.zeros_like(mean)
    marked[order[: int(np.searchsorted(np.cumsum(mean[order]), 0.5 * mean.sum())) + 1]] = 1
    return marked


def _to_unit(vectors: Array) -> Array:
    found: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), TINY)
    return found


def how_much_rarer(there: NDArray[np.bool_], here: NDArray[np.bool_]) -> float:
    """One minus the ratio of two rates, not below 0: 0 is as common there as here, 1 is never there. Each rate is taken at
    the careful end of its interval (Wilson 1927), so that a few pictures alone prove little."""
    highest = bound_share(float(there.mean()), len(there), Z)[1] if len(there) else 1.0
    lowest = bound_share(float(here.mean()), len(here), Z)[0] if len(here) else 0.0
    return max(0.0, 1 - highest / max(lowest, TINY))
