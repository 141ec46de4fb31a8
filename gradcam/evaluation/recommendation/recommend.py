"""Which method, score and layer to explain a model with: tried out on somebody's own pictures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradcam.cam.explain import compare
from gradcam.cam.methods.table import METHODS, find_methods
from gradcam.errors import BlindLayerError, GradcamError, GradcamWarning, LayerError, shorten
from gradcam.evaluation.metrics.grid import LEAST, Mosaic, Tile, arrange, find_tiles, grid_pointing_game
from gradcam.evaluation.metrics.perturbation import road
from gradcam.evaluation.recommendation.candidates import check_layers, find_candidates
from gradcam.evaluation.recommendation.result import (
    Combination,
    Recommendation,
    find_best,
    find_twins,
    list_best,
    subtract,
    to_rows,
)
from gradcam.evaluation.subject import Subject
from gradcam.models.classifier import Classifier
from gradcam.models.device import find_input_dtype
from gradcam.options import SCORES
from gradcam.targets import ClassTarget


def list_single_pass() -> list[str]:
    """The methods at a layer that take one forward pass of the model, and one backwards."""
    return [method.name for method in METHODS.values() if method.cost == "1" and method.place == "layer"]


def combine(methods: Sequence[str], scores: Sequence[str], layers: Sequence[str]) -> list[Combination]:
    """All combinations, each once. Methods that explain no score, or their own, are there once for each layer.

    Raises `GradcamError` for unknown methods and scores, and for methods that look at no layer.
    """
    found = find_methods(methods)
    for method in found:
        if method.place != "layer":
            raise GradcamError(f"{method.name} looks at no layer, and layers are what is to be chosen: leave it out.")
    if isinstance(scores, str) or not scores or not all(score in SCORES for score in scores):
        raise GradcamError(f"scores is {shorten(scores)}, expected some of {', '.join(SCORES)}.")
    combinations = [
        Combination(method.name, score if _has_score(method.name) else None, layer)
        for layer in layers
        for method in found
        for score in scores
    ]
    return list(dict.fromkeys(combinations))


def _has_score(name: str) -> bool:
    """Whether a method's map depends on which score is asked for."""
    method = METHODS[name]
    return method.score is None and method.needs != ("activations",)


@dataclass
class Trials:
    """What explains images in every way that is asked for. `left_out`: what turned out to have no map, and why."""

    classifier: Classifier
    reshape: Any = None
    left_out: dict[Combination, str] = field(default_factory=dict)

    def explain(
        self, images: Tensor, classes: Tensor, combinations: Iterable[Combination]
    ) -> Iterator[tuple[Combination, Tensor]]:
        """Each combination, and its heatmaps (N,K,H,W) in [0,1] of images (N,C,H,W) for classes (N,K).

        There is a pass for each score, and only its heatmaps are in memory. One is blank where the gradient at its layer is
        exactly zero. A combination that has no map at all is left out, here and from now on.
        """
        wanted = [it for it in combinations if it not in self.left_out]
        for score in SCORES:
            # Methods without a score go with the logits' pass.
            part = [it for it in wanted if (it.score or "logit") == score]
            if part:
                yield from self._explain(images, classes, score, part)

    def _explain(
        self, images: Tensor, classes: Tensor, score: str, wanted: Sequence[Combination]
    ) -> Iterator[tuple[Combination, Tensor]]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", GradcamWarning)  # whatever suits a method is found out here
                found = compare(
                    self.classifier.model,
                    images,
                    layers=list(dict.fromkeys(it.layer for it in wanted)),
                    methods=list(dict.fromkeys(it.method for it in wanted)),
                    target=ClassTarget(classes, score=score, activation=self.classifier.activation),
                    reshape=self.reshape,
                )
        except LayerError as error:
            if len(wanted) > 1:  # one of them is the reason: each by itself
                for it in wanted:
                    yield from self._explain(images, classes, score, [it])
            elif isinstance(error, BlindLayerError):
                yield wanted[0], images.new_zeros(*classes.shape, *images.shape[2:])
            else:
                self.left_out[wanted[0]] = str(error)
        else:
            for it in wanted:
                yield it, found[it.layer, it.method].heatmaps


SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the pixels that ROAD imputes
PICTURES = 4  # in one run of ROAD

Values = dict[Combination, Tensor]  # float64 (P,): one number for each picture


@dataclass(frozen=True, eq=False)
class Contest:
    """Mosaics, and the pictures that are in them. `step` is called after each mosaic, and each of ROAD's batches."""

    trials: Trials
    tiles: Sequence[Tile]
    mosaics: Sequence[Mosaic]
    seed: int
    step: Callable[[], None] = field(default=lambda: None)

    @property
    def batches(self) -> int:
        """How many steps ROAD takes for each combination."""
        return -(-len(self.tiles) // PICTURES)

    def play(self, combinations: Sequence[Combination]) -> tuple[Values, Values]:
        """The grid pointing game: mass and hits, each picture's mean over the mosaics that it is in."""
        places = {tile.name: place for place, tile in enumerate(self.tiles)}
        sums = {it: torch.zeros(2, len(places), dtype=torch.float64, device="cpu") for it in combinations}
        counts = torch.zeros(len(places), dtype=torch.float64, device="cpu")
        for mosaic in self.mosaics:
            at = [places[name] for name in mosaic.names]
            counts[at] += 1
            image = to_batch(self.trials.classifier, [mosaic.image])
            classes = torch.tensor([mosaic.classes], dtype=torch.int64, device=image.device)
            for it, heatmaps in self.trials.explain(image, classes, combinations):
                found = grid_pointing_game(heatmaps)
                sums[it][:, at] += torch.cat([found.mass, found.hits]).double().cpu()
            self.step()
        left = [it for it in combinations if it not in self.trials.left_out]
        return {it: sums[it][0] / counts for it in left}, {it: sums[it][1] / counts for it in left}

    def remove(self, combinations: Sequence[Combination]) -> Values:
        """ROAD of each picture alone, for its class, at the network's own size."""
        classifier = self.trials.classifier
        values: dict[Combination, list[Tensor]] = {it: [] for it in combinations}
        for start in range(0, len(self.tiles), PICTURES):
            part = self.tiles[start : start + PICTURES]
            images = to_batch(classifier, [tile.image for tile in part])
            classes = [tile.index for tile in part]
            subject = Subject(classifier.model, images, classes, activation=classifier.activation)
            for it, heatmaps in self.trials.explain(images, subject.classes[:, None], combinations):
                values[it].append(road(subject, heatmaps[:, 0], shares=SHARES, seed=self.seed).combined.double().cpu())
                self.step()
        return {it: torch.cat(parts) for it, parts in values.items() if parts}


def to_batch(classifier: Classifier, images: Sequence[Tensor]) -> Tensor:
    """Images (C,H,W) as the model takes them, (N,C,H,W)."""
    return torch.stack(list(images)).to(classifier.device, find_input_dtype(classifier.model))


MOSAICS = 12
SHORTLIST = 5  # combinations that ROAD is measured of, beside the default; those with the same maps count once

Progress = Callable[[int, int], None]


def recommend(
    classifier: Classifier,
    pictures: Mapping[str, Any],
    *,
    methods: Sequence[str] | None = None,
    scores: Sequence[str] = SCORES,
    layers: Sequence[str] | None = None,
    mosaics: int = MOSAICS,
    least: float = LEAST,
    seed: int = 0,
    reshape: Any = None,
    progress: Progress | None = None,
) -> Recommendation:
    """Try methods, scores and layers on pictures that need no annotations, and name the best combination.

    `pictures`, `least`: as in `make_mosaics`; `mosaics`: how many at most. `methods`: by default those of one forward pass;
    `scores`: keys of `SCORES`; `layers`: by default the handful that `candidates.find_candidates` tells of.

    First the grid pointing game measures all combinations: is a class's map on the class's picture? Then ROAD, at five
    shares of the pixels, measures those whose mass is not clearly less than the most (the 95 % interval of the difference,
    by the bootstrap over pictures, holds zero), at most five, in the single pictures: do the pixels that a map marks matter
    to the model? The best ROAD of these is recommended; of equal ones, the default: Grad-CAM of the logit at the
    classifier's layer, which is measured in any case. Combinations that have the same maps share their numbers.

    `seed`: of the mosaics, the noise and the bootstrap. `progress`: called with the steps done and the number of all.
    Raises `InputError` for fewer than four classes, `LayerError` where no combination has a map, `GradcamError` for unknown
    methods, scores and layers, and as the model does.
    """
    model = classifier.model
    default = Combination("gradcam", "logit", check_layers(model, [classifier.layer])[0])
    named = None if layers is None else check_layers(model, layers)
    names = list_single_pass() if methods is None else methods
    combine(names, scores, [default.layer])  # so that what is wrong with these is said before anything is computed
    tiles = find_tiles(classifier, pictures, least=least)
    arranged = arrange(model, tiles, limit=mosaics, seed=seed)
    chosen = named or find_candidates(model, to_batch(classifier, [tiles[0].image]), default.layer)
    wanted = combine(names, scores, chosen)
    used = {name for mosaic in arranged for name in mosaic.names}
    counter = _Counter(progress)
    contest = Contest(
        trials=Trials(classifier, reshape),
        tiles=[tile for tile in tiles if tile.name in used],
        mosaics=arranged,
        seed=seed,
        step=counter.step,
    )
    counter.total = len(arranged) + (SHORTLIST + 1) * contest.batches
    return _decide(contest, [*dict.fromkeys([default, *wanted])], counter)


def _decide(contest: Contest, combinations: Sequence[Combination], counter: _Counter) -> Recommendation:
    """The recommendation among these, of which the first is the default."""
    default, seed = combinations[0], contest.seed
    mass, hits = contest.play(combinations)
    if not mass:
        raise LayerError(next(iter(contest.trials.left_out.values())))
    twins = find_twins(mass, hits)
    shortlist = list_best(mass, twins, seed=seed, most=SHORTLIST)
    chosen = [*dict.fromkeys([*shortlist, *([twins[default]] if default in mass else [])])]
    counter.total = len(contest.mosaics) + len(chosen) * contest.batches
    measured = contest.remove(chosen)
    roads = {it: measured[twins[it]] for it in mass if twins[it] in measured}
    best = find_best(roads, [it for it in roads if twins[it] in shortlist], default)
    rows = to_rows(mass, hits, roads, best, seed)
    height, width = contest.mosaics[0].image.shape[1:]
    return Recommendation(
        model=contest.trials.classifier.name,
        rows=tuple(rows),
        best=rows[0],
        default=next((row for row in rows if row.combination == default), None),
        gain=subtract(mass[best], mass[default], seed) if default in mass else None,
        road_gain=subtract(roads[best], roads[default], seed) if default in mass else None,
        pictures=tuple(tile.name for tile in contest.tiles),
        mosaics=len(contest.mosaics),
        size=(int(height), int(width)),
        seed=seed,
        left_out=dict(contest.trials.left_out),
    )


@dataclass
class _Counter:
    """Steps, and somebody to tell."""

    progress: Progress | None
    total: int = 0
    done: int = 0

    def step(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)
