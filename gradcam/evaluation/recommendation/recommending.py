"""Which method, score and layer to explain a model with: tried out on somebody's own pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradcam.choices import SCORES
from gradcam.classifiers import Classifier
from gradcam.errors import LayerError
from gradcam.evaluation.mosaics import LEAST, arrange, find_tiles
from gradcam.evaluation.recommendation.candidates import check_layers, find_candidates
from gradcam.evaluation.recommendation.contest import Contest, to_batch
from gradcam.evaluation.recommendation.outcome import Combination, Recommendation
from gradcam.evaluation.recommendation.ranking import find_best, find_twins, list_best, subtract, to_rows
from gradcam.evaluation.recommendation.trials import Trials, combine, list_single_pass

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
