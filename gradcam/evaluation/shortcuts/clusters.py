"""Clusters of explanations within each class, and how far other pictures have their like: NumPy and scikit-learn alone.

After spectral relevance analysis (Lapuschkin et al. 2019, "Unmasking Clever Hans predictors and assessing what machines
really learn"), with a clustering by density (Campello et al. 2013, HDBSCAN), which needs no number of clusters and leaves
small groups whole. New is that clusters are ranked by how rare their place and their look are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradcam.errors import GradcamError

Array = NDArray[np.floating[Any]]

LEAST = 10  # pictures of a class that can be clustered
SMALLEST = 5  # pictures in a cluster
SHARE = 0.01  # of a class's pictures, that a cluster has at least
MOST = 0.5  # of a class's pictures: above it a cluster is what the class is about, and only its place can be suspicious
PARTS = 20  # principal components of the maps, and as many of the features
NEIGHBOURS = 3  # of a picture, which say how dense it is around it
Z = 1.645  # of the normal distribution: 95 % on one side
FLAT = 1e-6  # what values that differ for rounding alone do not exceed
TINY = float(np.finfo(np.float64).tiny)


def check_installed() -> None:
    """Raises `GradcamError` where scikit-learn is missing, or older than its HDBSCAN."""
    try:
        from sklearn.cluster import HDBSCAN  # noqa: F401
    except ImportError as error:
        raise GradcamError(
            f"Clusters need scikit-learn 1.3 or later ({error}): pip install 'gradcam-torch[audit]'"
        ) from error


@dataclass(frozen=True, eq=False)
class Group:
    """A cluster of one class. `members`: positions of its pictures, the most typical first. `share`: of its class.
    `map`: (h,w), their mean map, whose sum is 1. `place`, `apart`: from 0 to 1, as `compare` has them. `elsewhere`: how many
    of the `others` pictures of other classes have as much evidence in its place as half of its members have. `is_rest`:
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


def cluster(evidence: Evidence, *, seed: int = 0) -> list[Group]:
    """The clusters of all classes that have `LEAST` pictures, the most suspicious first; there are two classes or more."""
    groups = [
        group
        for class_, count in zip(*np.unique(evidence.classes, return_counts=True))
        if count >= LEAST
        for group in _cluster_class(evidence, int(class_), seed)
    ]
    return sorted(groups, key=lambda group: (-group.suspicion, -len(group.members), group.class_))


def _cluster_class(evidence: Evidence, class_: int, seed: int) -> Iterator[Group]:
    own = np.flatnonzero(evidence.classes == class_)
    # Of shares, the square root: its distances are Hellinger's, which small shares have a part in.
    points = np.concatenate([_reduce(np.sqrt(evidence.places[own]), seed), _reduce(evidence.looks[own], seed)], 1)
    labels = _find_dense(points)
    for label in np.unique(labels):
        inside = np.flatnonzero(labels == label)
        distances = np.linalg.norm(points[inside] - points[inside].mean(0), axis=1)
        yield compare(evidence, own[inside[np.argsort(distances, kind="stable")]], is_rest=bool(label < 0))


def _reduce(values: Array, seed: int) -> Array:
    """The first principal components (N,parts), scaled so that the mean of their squared lengths is 1."""
    from sklearn.decomposition import PCA

    if np.ptp(values, axis=0).max() < FLAT:  # all are alike
        return np.zeros((len(values), 1))
    found: Array = PCA(min(PARTS, *values.shape), svd_solver="randomized", random_state=seed).fit_transform(values)
    return found / max(float(np.sqrt((found**2).sum(1).mean())), TINY)


def _find_dense(points: Array) -> NDArray[np.intp]:
    """A cluster for each point, -1 for what is in none."""
    from sklearn.cluster import HDBSCAN

    smallest = max(SMALLEST, round(SHARE * len(points)))
    found: NDArray[np.intp] = HDBSCAN(min_cluster_size=smallest, min_samples=NEIGHBOURS, copy=True).fit_predict(points)
    return found


def compare(evidence: Evidence, members: NDArray[np.intp], *, is_rest: bool = False) -> Group:
    """How rare what these pictures of one class have in common is elsewhere.

    `place`: how much rarer, among pictures of other classes than among those of this one, is as much evidence in the
    cluster's place as half of its members have. `apart`: how much rarer, among all pictures outside of the cluster than in
    it, is what looks as much like its members as half of them do; a member is compared with the others."""
    class_ = evidence.classes[members[0]]
    is_own, is_inside = evidence.classes == class_, np.zeros(len(evidence.classes), bool)
    is_inside[members] = True
    mean = evidence.places[members].mean(0)
    amounts = evidence.places[:, _find_core(mean)].sum(1)
    is_there = amounts >= np.median(amounts[members])
    likeness = _measure_likeness(evidence.looks, members)
    is_alike = likeness >= np.median(likeness[members])
    return Group(
        class_=int(class_),
        members=members,
        share=len(members) / int(is_own.sum()),
        map=mean.reshape(evidence.grid),
        place=how_much_rarer(is_there[~is_own], is_there[is_own]),
        apart=how_much_rarer(is_alike[~is_inside], is_alike[is_inside]),
        elsewhere=int(is_there[~is_own].sum()),
        others=int((~is_own).sum()),
        is_rest=is_rest,
    )


def _find_core(mean: Array) -> NDArray[np.intp]:
    """The fewest cells that have half of a map."""
    order = np.argsort(-mean, kind="stable")
    return order[: int(np.searchsorted(np.cumsum(mean[order]), 0.5 * mean.sum())) + 1]


def _measure_likeness(looks: Array, members: NDArray[np.intp]) -> Array:
    """The cosine of each look (N,C) and the members' mean; of a member, and the mean of the others."""
    total = looks[members].sum(0)
    found: Array = looks @ _to_unit(total[None])[0]
    found[members] = (looks[members] * _to_unit(total - looks[members])).sum(1)
    return found


def _to_unit(vectors: Array) -> Array:
    found: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), TINY)
    return found


def how_much_rarer(there: NDArray[np.bool_], here: NDArray[np.bool_]) -> float:
    """One minus the ratio of two rates, not below 0: 0 is as common there as here, 1 is never there. Each rate is taken at
    the careful end of its interval (Wilson 1927), so that a few pictures alone prove little."""
    highest, lowest = _bound(int(there.sum()), len(there), Z), _bound(int(here.sum()), len(here), -Z)
    return max(0.0, 1 - highest / max(lowest, TINY))


def _bound(hits: int, count: int, z: float) -> float:
    """The end of Wilson's interval of a rate: the upper one for a positive z. Of no pictures, 1 or 0."""
    if count == 0:
        return float(z > 0)
    rate = hits / count
    middle = rate + z**2 / (2 * count)
    return float((middle + z * np.sqrt(rate * (1 - rate) / count + z**2 / (4 * count**2))) / (1 + z**2 / count))
