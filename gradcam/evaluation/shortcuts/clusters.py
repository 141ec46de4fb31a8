"""Cluster the explanations of each class, and measure how rare each cluster's evidence is in other images.

The method is spectral relevance analysis (Lapuschkin et al. 2019, "Unmasking Clever Hans predictors and assessing what
machines really learn"), but the clusters are chosen differently. Average linkage joins the images of a class into a
tree of clusters of every size. From this tree, the audit selects the clusters with the rarest position and appearance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradcam.errors import GradcamError, to_pip_command
from gradcam.evaluation.intervals import wilson_interval

Array = NDArray[np.floating[Any]]

MIN_IMAGES_PER_CLASS = 10
MIN_IMAGES_PER_CLUSTER = 5
MIN_CLUSTER_FRACTION = 0.01  # A cluster has at least this fraction of its class's images.
MAX_JOINED_IMAGES = 5000  # Linkage needs the distances of all pairs. Larger classes are subsampled evenly.
SPLIT_MARGIN = 0.05  # A cluster is split only if the suspicion of a part is higher by more than this.
MISFIT_FRACTION = 0.2  # An image has the evidence if its value is at least this quantile of the members' values.
OUTSIDE_QUANTILE = 0.99  # `purity` compares the members with this quantile of the similarities of other images.
MAIN_FRACTION = 0.5  # A cluster with more than this fraction of its class is typical of the class.
PARTS_PER_BATCH = 250  # A larger batch needs more memory, because each part is compared with all images.
Z = 1.645  # one-sided 95 % quantile of the normal distribution
ROUNDING_TOLERANCE = 1e-6  # Smaller differences are rounding errors.
TINY = float(np.finfo(np.float64).tiny)


def check_installed() -> None:
    """Raise `GradcamError` if scikit-learn is missing."""
    try:
        import sklearn.cluster  # noqa: F401
    except ImportError as error:
        raise GradcamError(f"Clustering needs scikit-learn ({error}): {to_pip_command('audit')}") from error


@dataclass(frozen=True, eq=False)
class Cluster:
    """Images of one class with similar evidence.

    `members` are indices into the evidence, the most typical first. `share` is the members' fraction of the class.
    `map` (h,w) is the members' mean map; its sum is 1. `place` and `apart` are from 0 to 1, as in `build_clusters`.
    `other_count` is the number of images of other classes. Let t be the
    amount of evidence at the cluster's position that 80 % of the members reach. `elsewhere` counts the images of other
    classes that reach t. `is_rest` marks the images of a class that fit no cluster. `purity` is from 0 to 1. It is the
    cosine similarity to the members' mean features that 80 % of the members reach, minus the similarity that 1 % of the
    images outside the cluster reach.
    """

    class_: int
    members: NDArray[np.intp]
    share: float
    map: Array
    place: float
    apart: float
    elsewhere: int
    other_count: int
    is_rest: bool = False
    purity: float = 0.0

    @property
    def suspicion(self) -> float:
        """Return the suspicion, from 0 to 1.

        A unique appearance (`apart`) gives a suspicion of up to one half. A position that is rare in other classes
        (`place`) can double the suspicion. If the cluster contains most images of its class, or the images that fit no
        cluster, the suspicion is `apart` times `place`. For such a cluster, a unique appearance alone does not count.
        """
        is_main = self.is_rest or self.share > MAIN_FRACTION
        return self.apart * (self.place if is_main else (1 + self.place) / 2)


@dataclass(frozen=True, eq=False)
class Evidence:
    """The evidence in N images: their classes (N,), maps with the sum 1, and features with the norm 1.

    `places` (N,h*w) are the flattened maps, which hold the position of the evidence. `looks` (N,C) are the features,
    which describe the appearance of the evidence.
    """

    classes: NDArray[np.int64]
    grid: tuple[int, int]
    places: Array
    looks: Array

    @classmethod
    def from_maps(cls, classes: NDArray[np.int64], maps: Array, features: Array) -> Evidence:
        """Normalise maps (N,h,w) and features (N,C), and return the evidence. No map may be negative or blank."""
        places = maps.reshape(len(maps), -1).astype(np.float64)
        places /= places.sum(1, keepdims=True)
        return cls(classes, maps.shape[1:], places, _to_unit(features.astype(np.float64)))


def cluster(evidence: Evidence) -> list[Cluster]:
    """Cluster each class with enough images, and return all clusters, the most suspicious first."""
    return find_cues(evidence)[0]


def find_cues(evidence: Evidence) -> tuple[list[Cluster], list[Cluster]]:
    """Return the clusters of all classes with enough images, the most suspicious first, and the whole-class cues.

    The clusters of a class are disjoint. The whole-class cue of a class is the cluster with more than half of the
    class's images that has the largest product of share and purity. Whole-class cues are sorted by this product. There
    must be at least two classes.
    """
    clusters, whole_class = [], []
    for class_, count in zip(*np.unique(evidence.classes, return_counts=True)):
        if count >= MIN_IMAGES_PER_CLASS:
            cue, *parts = _cluster_class(evidence, np.flatnonzero(evidence.classes == class_))
            clusters += parts
            whole_class.append(cue)
    clusters.sort(key=lambda cluster: (-cluster.suspicion, -len(cluster.members), cluster.class_))
    return clusters, sorted(whole_class, key=lambda cue: -cue.share * cue.purity)


def _cluster_class(evidence: Evidence, members: NDArray[np.intp]) -> Iterator[Cluster]:
    """Yield the whole-class cue, then disjoint clusters. The last cluster holds the images that fit no other cluster."""
    sample = members[:: -(-len(members) // MAX_JOINED_IMAGES)]
    # The distance between the square roots of two maps is the Hellinger distance, in which cells with little evidence
    # count as well.
    points = np.concatenate([_scale(np.sqrt(evidence.places[sample])), _scale(evidence.looks[sample])], 1)
    pairs, order, slices = _join(points)
    min_size = max(MIN_IMAGES_PER_CLUSTER, round(MIN_CLUSTER_FRACTION * len(sample)))
    nodes = [node for node, span in enumerate(slices) if span.stop - span.start >= min_size]
    clusters = dict(zip(nodes, build_clusters(evidence, [sample[order[slices[node]]] for node in nodes])))
    best: dict[int, tuple[float, list[int]]] = {}
    for node in nodes:  # In `nodes`, children come before their parents.
        children = [best[child] for child in pairs[node - len(sample)] if child in best]
        highest = max((suspicion for suspicion, _ in children), default=0.0)
        if clusters[node].suspicion >= highest - SPLIT_MARGIN:
            best[node] = clusters[node].suspicion, [node]
        else:
            best[node] = highest, [node for _, part_nodes in children for node in part_nodes]
    _, selected = best[nodes[-1]]
    main = [node for node in nodes if 2 * (slices[node].stop - slices[node].start) > len(sample)]
    cue = max(main, key=lambda node: clusters[node].share * clusters[node].purity)
    for node in [cue, *selected]:
        inside = order[slices[node]]
        distances = np.linalg.norm(points[inside] - points[inside].mean(0), axis=1)
        yield replace(clusters[node], members=sample[inside[np.argsort(distances, kind="stable")]])
    unclustered = np.setdiff1d(members, np.concatenate([clusters[node].members for node in selected]))
    if len(unclustered):
        yield replace(next(build_clusters(evidence, [unclustered])), is_rest=True)


def _scale(values: Array) -> Array:
    """Centre values (N,P), and scale them to a mean squared norm of 1. Return zeros if all rows are equal."""
    if np.ptp(values, axis=0).max() < ROUNDING_TOLERANCE:
        return np.zeros((len(values), 1))
    centred: Array = values - values.mean(0)
    return centred / max(float(np.sqrt((centred**2).sum(1).mean())), TINY)


def _join(points: Array) -> tuple[NDArray[np.intp], NDArray[np.intp], list[slice]]:
    """Build a linkage tree over points.

    Return the two children of each inner node, an order of the points, and one slice per node. In this order, the
    points below a node are contiguous, and the node's slice selects these points. The points are the nodes 0 to N - 1.
    The inner nodes have higher numbers, and the root has the highest number.
    """
    from sklearn.cluster import AgglomerativeClustering

    tree = AgglomerativeClustering(n_clusters=None, distance_threshold=0, linkage="average").fit(points)
    pairs: NDArray[np.intp] = tree.children_
    sizes = [1] * len(points)
    for first, second in pairs:
        sizes.append(sizes[first] + sizes[second])
    starts = [0] * len(sizes)
    for node in range(len(sizes) - 1, len(points) - 1, -1):
        first, second = pairs[node - len(points)]
        starts[first], starts[second] = starts[node], starts[node] + sizes[first]
    order = np.argsort(starts[: len(points)])
    return pairs, order, [slice(start, start + size) for start, size in zip(starts, sizes)]


def build_clusters(evidence: Evidence, parts: Sequence[NDArray[np.intp]]) -> Iterator[Cluster]:
    """Yield a cluster from each part of one class, and measure how rare the part's evidence is in other images.

    A value is computed for each image, and 80 % of the part's members reach a threshold. An image that reaches the
    threshold has the evidence. For `place`, the value is the amount of evidence at the part's position. Images
    of other classes are compared with images of the part's class. For `apart`, the value is the similarity to the part's
    mean features. Images outside the part are compared with members of the part. For a member, the mean features are
    computed from the other members.
    """
    class_ = int(evidence.classes[parts[0][0]])
    in_class = evidence.classes == class_
    for first in range(0, len(parts), PARTS_PER_BATCH):
        batch = parts[first : first + PARTS_PER_BATCH]
        means = [evidence.places[members].mean(0) for members in batch]
        amounts = evidence.places @ np.stack([_mark_core(mean) for mean in means], 1)
        totals = np.stack([evidence.looks[members].sum(0) for members in batch])
        similarities = evidence.looks @ _to_unit(totals).T
        for members, mean, amount, total, similarity in zip(batch, means, amounts.T, totals, similarities.T):
            member_looks = evidence.looks[members]
            similarity[members] = (member_looks * _to_unit(total - member_looks)).sum(1)
            min_look = np.quantile(similarity[members], MISFIT_FRACTION, method="lower")
            outside = np.delete(similarity, members)
            has_place = amount >= np.quantile(amount[members], MISFIT_FRACTION, method="lower")
            yield Cluster(
                class_,
                members,
                share=len(members) / int(in_class.sum()),
                map=mean.reshape(evidence.grid),
                place=estimate_rarity(has_place[~in_class], has_place[in_class]),
                apart=estimate_rarity(outside >= min_look, similarity[members] >= min_look),
                elsewhere=int(has_place[~in_class].sum()),
                other_count=int((~in_class).sum()),
                purity=float(max(0.0, min_look - np.quantile(outside, OUTSIDE_QUANTILE))),
            )


def _mark_core(mean: Array) -> Array:
    """Return 1 for the smallest set of cells that holds half of a map's evidence, and 0 for all other cells."""
    order = np.argsort(-mean, kind="stable")
    core = np.zeros_like(mean)
    core[order[: int(np.searchsorted(np.cumsum(mean[order]), 0.5 * mean.sum())) + 1]] = 1
    return core


def _to_unit(vectors: Array) -> Array:
    units: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), TINY)
    return units


def estimate_rarity(outside: NDArray[np.bool_], inside: NDArray[np.bool_]) -> float:
    """Return 1 - (rate outside) / (rate inside), at least 0. Near 1, the evidence hardly ever occurs outside.

    The outside rate is the upper end of its Wilson score interval (Wilson 1927), and the inside rate is the lower end.
    With few images, the intervals are wide, and the rarity is low.
    """
    highest = wilson_interval(float(outside.mean()), len(outside), Z)[1] if len(outside) else 1.0
    lowest = wilson_interval(float(inside.mean()), len(inside), Z)[0] if len(inside) else 0.0
    return max(0.0, 1 - highest / max(lowest, TINY))
