"""Recommend a method, a score and a layer for a model, by measuring combinations on the user's images."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gradcam.cam.candidates import find_layers_with_grid
from gradcam.cam.compare import compare
from gradcam.cam.listing import list_layers
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import METHODS, find_methods
from gradcam.errors import BlindLayerError, GradcamError, GradcamWarning, LayerError, format_fields, shorten
from gradcam.evaluation.explainers import StepCounter
from gradcam.evaluation.intervals import CONFIDENCE, MIN_IMAGES_TO_COMPARE, Interval, mean_interval, paired_difference
from gradcam.evaluation.metrics.localisation import order_pointing_game
from gradcam.evaluation.metrics.mosaic import MIN_PROBABILITY, Mosaic, Tile, arrange_tiles, grid_pointing_game, to_tiles
from gradcam.evaluation.metrics.perturbation import road
from gradcam.evaluation.subject import Subject, to_batch, to_tensor
from gradcam.hooks import containers
from gradcam.hooks.hooks import Hooks
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.find import find_layer, unwrap
from gradcam.models.classifier import Classifier
from gradcam.options import SCORES, Progress, accept_old_parameters, argument_error, keep_old_names
from gradcam.renames import RECOMMEND, add_old_keys
from gradcam.targets.classes import ClassTarget

DEFAULT_MOSAICS = 12
SHORTLIST_SIZE = 5  # number of combinations, besides the default, for which each question computes ROAD
FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.9)  # fractions of the pixels that ROAD imputes
ROAD_BATCH_SIZE = 4
TOLERANCE = 1e-4  # Smaller differences count as zero.
MAX_COARSE_LAYERS = 4  # largest number of candidates with the coarsest grid, the last layers first
MAX_BLOCKS = 3  # number of blocks to compare if all layers have the same grid size, as in a transformer


@dataclass(frozen=True)
class Combination:
    """A method, its explained score, and a layer. `score` is None if the method has a fixed score, or uses no score."""

    method: str
    score: str | None
    layer: str

    def __str__(self) -> str:
        return f"{self.method}{f' of the {self.score}' if self.score else ''} at {self.layer}"


Maps = Iterator[tuple[Combination, Tensor]]  # heatmaps (N,K,H,W)
Values = Mapping[Combination, Tensor]  # float64 (P,): one value per image; NaN for images without a value
Objects = Mapping[str, Mapping[int, Any]]  # masks, bool (H,W), by image name and class


@dataclass(frozen=True)
class Row:
    """The results of one combination: means over images, with intervals.

    `order_behind` and `road_behind` are differences: this combination minus the best. None marks uncomputed values.
    """

    combination: Combination
    order: Interval
    order_behind: Interval
    mass: Interval
    maximum: Interval
    objects: Interval | None = None
    road: Interval | None = None
    road_behind: Interval | None = None

    __repr__ = format_fields


@keep_old_names
@dataclass(frozen=True)
class Answer:
    """The recommendation for one question.

    Attributes
    ----------
    row : Row
        The recommended combination: the leader if it is significantly better than the default, otherwise the default.
    leader : Row
        The combination with the highest value of the measure, even if it is not significantly better than the default.
    measure : str
        The measure: "order" in mosaics, "road", or "objects".
    gain : Interval or None
        The mean difference in `measure` over images, leader minus default. None if the default cannot be used. The
        leader was chosen as the best of all combinations. The interval is corrected for this choice: its confidence
        level is 95 % for all combinations together.
    road_gain : Interval or None
        The mean difference in ROAD over images, leader minus default. The confidence level is 95 %.

    Examples
    --------
    >>> import gradcam
    >>> images = {"both": "photo.jpg", "cup": "photos/coffee.jpg", "rocket": "photos/rocket.jpg", "man": "other.png"}
    >>> few = {"methods": ["gradcam"], "scores": ["logit"], "layers": ["layer4"], "min_probability": 0.2}
    >>> recommendation = gradcam.evaluation.recommend(gradcam.load_classifier(), images, **few)
    >>> answer: gradcam.evaluation.Answer = recommendation.several_objects
    >>> answer.measure, answer.row.combination.layer, answer.is_clear  # four images are too few
    ('order', 'layer4', False)
    """

    row: Row
    leader: Row
    measure: Literal["order", "road", "objects"]
    gain: Interval | None
    road_gain: Interval | None

    @property
    def is_clear(self) -> bool:
        """Return True if the leader is significantly better than the default."""
        return self.gain is None or (self.gain.low > TOLERANCE and not self.is_unfaithful)

    @property
    def is_unfaithful(self) -> bool:
        """Return True if the leader's ROAD is significantly lower than the default's."""
        return self.road_gain is not None and self.road_gain.high < -TOLERANCE

    def to_dict(self) -> dict[str, Any]:
        """Return the recommendation as dicts, strings and numbers, ready for JSON."""
        record = {**vars(self.row.combination), "measure": self.measure, "leader": {**vars(self.leader.combination)}}
        gains = {"gain": self.gain, "road_gain": self.road_gain}
        return add_old_keys(RECOMMEND, record | {name: gain and gain.to_fields() for name, gain in gains.items()})


@keep_old_names
@dataclass(frozen=True)
class Recommendation:
    """The best combinations of method, score and layer for a model on your images, for two questions.

    Attributes
    ----------
    model : str
        The classifier's name.
    rows : tuple of Row
        All combinations. Combinations with a ROAD score come first, sorted by ROAD. All other combinations are sorted
        by `order`. The highest values come first.
    single_object : Answer
        Where is the object? The measure is `objects` if there are enough annotations, otherwise ROAD.
    several_objects : Answer
        Which of several objects belongs to the class? The measure is `order` in mosaics.
    default : Row or None
        The default combination; None if the default cannot be used.
    images : tuple of str
        The names of the used images.
    mosaics : int
        The number of mosaics.
    size : (int, int)
        Height and width of each mosaic.
    seed : int
        The random seed.
    left_out : mapping of Combination to str
        Combinations that cannot be used, and why.

    Examples
    --------
    >>> import gradcam
    >>> images = {"both": "photo.jpg", "cup": "photos/coffee.jpg", "rocket": "photos/rocket.jpg", "man": "other.png"}
    >>> few = {"methods": ["gradcam"], "scores": ["logit"], "layers": ["layer4"], "min_probability": 0.2}
    >>> result = gradcam.evaluation.recommend(gradcam.load_classifier(), images, **few)
    >>> result.single_object.row is result.default, result.to_dict()["mosaics"]
    (True, 1)
    """

    model: str
    rows: tuple[Row, ...]
    single_object: Answer
    several_objects: Answer
    default: Row | None
    images: tuple[str, ...]
    mosaics: int
    size: tuple[int, int]
    seed: int
    left_out: Mapping[Combination, str]

    def __repr__(self) -> str:
        rows = (self.single_object.row, self.several_objects.row)
        single, several = (f"{row.combination}{', the default' if row is self.default else ''}" for row in rows)
        basis = f"the best of {len(self.rows)} combinations on {len(self.images)} image(s) in {self.mosaics} mosaic(s)"
        return f"Recommendation(one object: {single}; which of several: {several}; for {self.model}: {basis})"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as lists, dicts, strings and numbers, ready for JSON."""
        numbers = ("order", "order_behind", "mass", "maximum", "objects", "road", "road_behind")
        record = {
            "model": self.model,
            "single_object": self.single_object.to_dict(),
            "several_objects": self.several_objects.to_dict(),
            "default": self.default and {**vars(self.default.combination)},
            "images": list(self.images),
            "mosaics": self.mosaics,
            "size": list(self.size),
            "seed": self.seed,
            "rows": [
                vars(row.combination) | {name: (value := getattr(row, name)) and value.to_fields() for name in numbers}
                for row in self.rows
            ],
            "left_out": [{**vars(key), "reason": reason} for key, reason in self.left_out.items()],
        }
        return add_old_keys(RECOMMEND, record)


@accept_old_parameters
def recommend(
    classifier: Classifier,
    images: Mapping[str, Any],
    *,
    methods: Sequence[str | Method] | None = None,
    scores: Sequence[str] = SCORES,
    layers: Sequence[str] | None = None,
    objects: Objects | None = None,
    mosaics: int = DEFAULT_MOSAICS,
    min_probability: float = MIN_PROBABILITY,
    seed: int = 0,
    reshape: Any = None,
    progress: Progress | None = None,
) -> Recommendation:
    """Find the best method, score and layer for two questions about your images. Annotations are optional.

    *Which of several objects belongs to the class?* In mosaics of four images, `order` measures how often the heatmap
    is higher at a pixel of the class's image than at a pixel of the other images. *Where is the object?* In single
    images, ROAD measures how much the model depends on the pixels with the highest heatmap values. ROAD is computed for
    the five best combinations of the first question. With annotations, `objects` replaces ROAD. `objects` measures how
    often the heatmap is higher on the object than outside the object. `mass` is reported but not used, because
    sharpening a heatmap increases its mass in the class's image.

    The best of many combinations is best partly by chance. Another combination replaces the default (Grad-CAM of the
    logit at the classifier's layer) only if it is significantly better in a paired test at 5 %, with Bonferroni's
    correction for all combinations. The default is also kept if the other combination has a significantly lower ROAD,
    or if there are fewer than 8 images. Combinations with equal heatmaps get equal numbers.

    Parameters
    ----------
    classifier : Classifier
        The model.
    images : mapping of str to image
        The images by name, as in `make_mosaics`.
    methods : sequence of str or Method, default None
        Methods with a target layer. None selects all methods with a target layer that need only one forward pass.
    scores : sequence of str, default ("logit", "probability", "contrast")
        As in `targets.ClassTarget`.
    layers : sequence of str, default None
        Layer names. None selects the classifier's layer and a few deep layers that may be better.
    objects : mapping of str to mappings of int to Tensor or array (H,W), default None
        Annotated objects: a mapping from image name to a mapping from class index to a bool mask. The mask has the
        height and width of the preprocessed image. An image without an object of its top class is ignored.
    mosaics : int, default 12
        The largest number of mosaics.
    min_probability : float, default 0.5
        As in `make_mosaics`.
    seed : int, default 0
        Random seed of the mosaics and the noise.
    reshape : tuple, str or callable, default None
        As in `gradcam.explain`.
    progress : callable, default None
        Called with the number of finished steps and the total.

    Returns
    -------
    Recommendation
        The answers to both questions, `single_object` and `several_objects`, and the results of all combinations.

    Raises
    ------
    InputError
        If the images with a probability of at least `min_probability` belong to fewer than four classes.
    LayerError
        If no combination can be used.
    GradcamError
        If a method, score or layer is unknown, or a method has no target layer. Errors of the model are passed on.

    Examples
    --------
    >>> import gradcam
    >>> images = {"both": "photo.jpg", "cup": "photos/coffee.jpg", "rocket": "photos/rocket.jpg", "man": "other.png"}
    >>> few = {"methods": ["gradcam", "hirescam"], "scores": ["logit"], "layers": ["layer4"], "min_probability": 0.2}
    >>> result = gradcam.evaluation.recommend(gradcam.load_classifier(), images, **few)
    >>> result.several_objects.row.combination.layer, len(result.rows)
    ('layer4', 2)
    """
    model = classifier.model
    default = Combination("gradcam", "logit", resolve_layer_names(model, [classifier.layer])[0])
    layer_names = None if layers is None else resolve_layer_names(model, layers)
    names = list_single_pass_methods() if methods is None else methods
    combine(names, scores, [default.layer])  # Invalid arguments raise an error before the computation starts.
    tiles = to_tiles(classifier, images, least=min_probability)
    mosaic_list = arrange_tiles(model, tiles, limit=mosaics, seed=seed)
    candidates = layer_names or find_candidates(model, to_batch(classifier, [tiles[0].image]), default.layer)
    used = {name for mosaic in mosaic_list for name in mosaic.names}
    explainer = CombinationExplainer(classifier, reshape, {method.name: method for method in find_methods(names)})
    tiles = [tile for tile in tiles if tile.name in used]
    benchmark = Benchmark(explainer, tiles, mosaic_list, seed, StepCounter(progress))
    benchmark.counter.total = len(mosaic_list) + (SHORTLIST_SIZE + 1) * len(benchmark.batches)
    return decide(benchmark, [*dict.fromkeys([default, *combine(names, scores, candidates)])], objects or {})


def decide(benchmark: Benchmark, combinations: Sequence[Combination], objects: Objects) -> Recommendation:
    """Measure combinations, and recommend one for each question; the first combination is the default.

    Raise `LayerError` if no combination has a heatmap.
    """
    default, left_out = combinations[0], benchmark.explainer.left_out
    scores = benchmark.score_mosaics(combinations)
    if not scores.order:
        raise LayerError(next(iter(left_out.values())))
    first_of = find_first_equal(scores)
    distinct = [key for key in scores.order if first_of[key] == key]
    pointing = benchmark.score_objects(distinct, objects)
    mosaic_best = list_best({key: scores.order[key] for key in distinct})
    object_best = list_best(pointing) if pointing else mosaic_best
    best = [*dict.fromkeys([*object_best, *mosaic_best, *([first_of[default]] if default in scores.order else [])])]
    benchmark.counter.total = benchmark.counter.done + len(best) * len(benchmark.batches)
    road_values = benchmark.score_road(best)
    roads = {key: road_values[first_of[key]] for key in scores.order if first_of[key] in road_values}
    pointing = {key: pointing[first_of[key]] for key in scores.order if pointing}
    rows = to_rows(scores, pointing, roads)
    row_of = {row.combination: row for row in rows}

    def answer(measure: Literal["order", "road", "objects"], values: Values, leaders: Sequence[Combination]) -> Answer:
        leader = find_best({key: values[key] for key in values if key == default or first_of[key] in leaders}, default)
        if default not in scores.order:
            return Answer(row_of[leader], row_of[leader], measure, None, None)
        gain = subtract(values[leader], values[default], level=1 - (1 - CONFIDENCE) / max(1, len(distinct) - 1))
        result = Answer(row_of[leader], row_of[leader], measure, gain, subtract(roads[leader], roads[default]))
        return result if result.is_clear else replace(result, row=row_of[default])

    height, width = benchmark.mosaics[0].image.shape[1:]
    return Recommendation(
        model=benchmark.explainer.classifier.name,
        rows=tuple(rows),
        single_object=answer("objects", pointing, object_best) if pointing else answer("road", roads, object_best),
        several_objects=answer("order", scores.order, mosaic_best),
        default=row_of.get(default),
        images=tuple(tile.name for tile in benchmark.tiles),
        mosaics=len(benchmark.mosaics),
        size=(int(height), int(width)),
        seed=benchmark.seed,
        left_out=dict(left_out),
    )


def list_single_pass_methods() -> list[str]:
    """List the methods with a target layer that need only one forward and one backward pass."""
    return [method.name for method in METHODS.values() if method.cost == "1" and method.place == "layer"]


def combine(methods: Sequence[str | Method], scores: Sequence[str], layers: Sequence[str]) -> list[Combination]:
    """List all combinations. Raise `GradcamError` for unknown names, and for methods without a target layer."""
    resolved = find_methods(methods)
    for method in resolved:
        if method.place != "layer":
            raise GradcamError(f"{method.name} uses no target layer: leave this method out.")
    if isinstance(scores, str) or not scores or not all(score in SCORES for score in scores):
        raise GradcamError(f"scores is {shorten(scores)}, expected a list of some of {', '.join(SCORES)}.")
    fixed = {method.name for method in resolved if method.score is not None or method.needs == ("activations",)}
    grid = product(layers, [method.name for method in resolved], scores)
    return [*dict.fromkeys(Combination(name, None if name in fixed else score, layer) for layer, name, score in grid)]


@dataclass
class CombinationExplainer:
    """Explains images with combinations. `left_out` maps combinations without a heatmap to the reasons."""

    classifier: Classifier
    reshape: Any = None
    methods: Mapping[str, Method] = field(default_factory=dict)
    left_out: dict[Combination, str] = field(default_factory=dict)

    def explain(self, images: Tensor, classes: Tensor, combinations: Iterable[Combination]) -> Maps:
        """Yield the heatmaps (N,K,H,W) in [0,1] of each combination, for images (N,C,H,W) and classes (N,K).

        Each score has a separate pass, so that only the heatmaps of one pass are in memory. If the gradient at a layer
        is exactly zero, the heatmap is blank. A combination that fails is added to `left_out`, and not tried again.
        """
        requested = [combo for combo in combinations if combo not in self.left_out]
        for score in SCORES:
            # Combinations without a score share the pass of the logits.
            if group := [combo for combo in requested if (combo.score or "logit") == score]:
                yield from self._explain(images, classes, score, group)

    def _explain(self, images: Tensor, classes: Tensor, score: str, requested: Sequence[Combination]) -> Maps:
        layers = list(dict.fromkeys(combo.layer for combo in requested))
        methods = [self.methods.get(name, name) for name in dict.fromkeys(combo.method for combo in requested)]
        target = ClassTarget(classes, score=score, activation=self.classifier.activation)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", GradcamWarning)  # The results show poor heatmaps as well.
                model, reshape = self.classifier.model, self.reshape
                explanations = compare(model, images, layers=layers, methods=methods, target=target, reshape=reshape)
        except LayerError as error:
            if len(requested) > 1:  # Run each combination alone, to find the combinations that fail.
                for combo in requested:
                    yield from self._explain(images, classes, score, [combo])
            elif isinstance(error, BlindLayerError):
                yield requested[0], images.new_zeros(*classes.shape, *images.shape[2:])
            else:
                self.left_out[requested[0]] = str(error)
        else:
            yield from ((combo, explanations[combo.layer, combo.method].heatmaps) for combo in requested)


class MosaicScores(NamedTuple):
    """The results of the grid pointing game for each combination. An image's value is the mean over its mosaics."""

    order: Values
    mass: Values
    hits: Values


@dataclass(frozen=True, eq=False)
class Benchmark:
    """Measures combinations on mosaics and their images. `counter` counts the mosaics and the batches of ROAD."""

    explainer: CombinationExplainer
    tiles: Sequence[Tile]
    mosaics: Sequence[Mosaic]
    seed: int
    counter: StepCounter = field(default_factory=lambda: StepCounter(None))

    @property
    def batches(self) -> list[Sequence[Tile]]:
        return [self.tiles[i : i + ROAD_BATCH_SIZE] for i in range(0, len(self.tiles), ROAD_BATCH_SIZE)]

    def score_mosaics(self, combinations: Sequence[Combination]) -> MosaicScores:
        """Play the grid pointing game with each combination."""
        positions = {tile.name: position for position, tile in enumerate(self.tiles)}
        sums = {key: torch.zeros(3, len(positions), dtype=torch.float64, device="cpu") for key in combinations}
        counts = torch.zeros(len(positions), dtype=torch.float64, device="cpu")
        for mosaic in self.mosaics:
            indices = [positions[name] for name in mosaic.names]
            counts[indices] += 1
            image = to_batch(self.explainer.classifier, [mosaic.image])
            classes = torch.tensor([mosaic.classes], dtype=torch.int64, device=image.device)
            for key, heatmaps in self.explainer.explain(image, classes, combinations):
                pointing = grid_pointing_game(heatmaps)
                sums[key][:, indices] += torch.cat([pointing.order, pointing.mass, pointing.hits]).cpu().double()
            self.counter.step()
        means = {key: sums[key] / counts for key in combinations if key not in self.explainer.left_out}
        return MosaicScores(*({key: mean[i] for key, mean in means.items()} for i in range(3)))

    def score_objects(self, combinations: Sequence[Combination], objects: Objects) -> Values:
        """Return `order` for annotated objects: NaN for images without objects, {} if too few images have objects."""
        masks = {tile.name: objects.get(tile.name, {}).get(tile.index) for tile in self.tiles}
        if sum(mask is not None for mask in masks.values()) < MIN_IMAGES_TO_COMPARE:
            return {}
        values = {key: torch.full((len(masks),), math.nan, dtype=torch.float64, device="cpu") for key in combinations}
        for position, tile in enumerate(self.tiles):
            if (mask := masks[tile.name]) is not None:
                image = to_batch(self.explainer.classifier, [tile.image])
                classes = torch.tensor([[tile.index]], dtype=torch.int64, device=image.device)
                for key, heatmaps in self.explainer.explain(image, classes, combinations):
                    values[key][position] = float(order_pointing_game(heatmaps[:, 0], to_tensor(mask)[None]))
        return {key: order for key, order in values.items() if key not in self.explainer.left_out}

    def score_road(self, combinations: Sequence[Combination]) -> Values:
        """Return the ROAD score of each single image for its class, at the model's input size."""
        classifier = self.explainer.classifier
        values: dict[Combination, list[Tensor]] = {key: [] for key in combinations}
        for tiles in self.batches:
            images, classes = to_batch(classifier, [tile.image for tile in tiles]), [tile.index for tile in tiles]
            subject = Subject(classifier.model, images, classes, activation=classifier.activation)
            for key, maps in self.explainer.explain(images, subject.classes[:, None], combinations):
                values[key].append(road(subject, maps[:, 0], shares=FRACTIONS, seed=self.seed).combined.cpu().double())
                self.counter.step()
        return {key: torch.cat(parts) for key, parts in values.items() if parts}


def subtract(values: Tensor, reference: Tensor, *, level: float = CONFIDENCE) -> Interval:
    """Return the mean difference and its interval, which is infinite for fewer than `MIN_IMAGES_TO_COMPARE` images."""
    difference = paired_difference(values.tolist(), reference.tolist(), level=level)
    is_enough = difference.n >= MIN_IMAGES_TO_COMPARE
    return difference if is_enough else replace(difference, low=-math.inf, high=math.inf)


def find_first_equal(scores: MosaicScores) -> dict[Combination, Combination]:
    """Map each combination to the first combination with equal results, because methods can give equal heatmaps."""
    first_of: dict[Combination, Combination] = {}
    numbers = {key: torch.cat([scores.order[key], scores.mass[key], scores.hits[key]]) for key in scores.order}
    for key, values in numbers.items():
        first = next((earlier for earlier in first_of if (numbers[earlier] - values).abs().max() <= TOLERANCE), key)
        first_of[key] = first_of.get(first, first)
    return first_of


def find_best(values: Values, default: Combination) -> Combination:
    """Return the combination with the highest mean, ignoring NaN. In a tie, the default wins, then the first."""
    return max(values, key=lambda key: (round(float(values[key].nanmean()) / TOLERANCE), key == default))


def list_best(values: Values) -> list[Combination]:
    """Return up to five combinations with the highest means, the highest first."""
    return sorted(values, key=lambda key: -float(values[key].nanmean()))[:SHORTLIST_SIZE]


def to_rows(scores: MosaicScores, objects: Values, roads: Values) -> list[Row]:
    """Return one row per combination. Rows with ROAD come first, sorted by ROAD. The others are sorted by `order`."""
    best_by_order = max(scores.order, key=lambda key: float(scores.order[key].mean()))
    best_by_road = max(roads, key=lambda key: float(roads[key].mean()), default=best_by_order)

    def mean(values: Values, key: Combination) -> Any:
        return mean_interval(values[key].tolist()) if key in values else None

    rows = [
        Row(
            key,
            order=mean(scores.order, key),
            order_behind=subtract(scores.order[key], scores.order[best_by_order]),
            mass=mean(scores.mass, key),
            maximum=mean(scores.hits, key),
            objects=mean(objects, key),
            road=mean(roads, key),
            road_behind=subtract(roads[key], roads[best_by_road]) if key in roads else None,
        )
        for key in scores.order
    ]
    return sorted(rows, key=lambda row: (row.road is None, -(row.road or row.order).mean))


def find_candidates(model: nn.Module, image: Tensor, default: str) -> list[str]:
    """List up to seven layers: `default`, then candidates whose heatmaps may be better.

    The last layer is the layer whose `forward` returns last for `image` (1,C,H,W). The candidates are:
    - with the coarsest grid, the last four layers that are children of the model or of an `nn.Sequential`, such as
      blocks. Layers in branches, and layers in the first quarter of the model, are left out;
    - with the next finer grid, the last of the least nested layers, such as a block;
    - in a model with a single grid size, such as a transformer, the counterparts of `default` in two earlier blocks.
    If a block returns the output of its last submodule, only the block is listed. Raise `LayerError` if `default` is
    unknown, or if no layer has a grid.
    """
    model = unwrap(model)
    default = find_layer(model, default).name
    with_grid = set(find_layers_with_grid(model, containers.to_batch(image)))
    rows = [row for row in list_layers(model, image) if row.cam and not row.is_out_of_place]
    cells = {row.name: math.prod(row.grid) for row in rows if row.grid and row.name in with_grid}
    names = _list_by_finish(model, image)
    coarsest, *finer_sizes = sorted(set(cells.values())) or [0]

    def is_in_sequence(name: str) -> bool:
        parents = accumulate(name.split(".")[:-1], "{}.{}".format)
        return all(isinstance(model.get_submodule(parent), nn.Sequential) for parent in parents)

    coarse = [name for name in names[len(names) // 4 :] if cells.get(name) == coarsest and is_in_sequence(name)]
    candidates = [default, *coarse[::-1][:MAX_COARSE_LAYERS]]
    if finer_sizes:
        finer_layers = [name for name in reversed(names) if cells.get(name) == finer_sizes[0]]
        candidates += sorted(finer_layers, key=lambda name: name.count("."))[:1]
    elif number := re.search(r"\d+(?=\.|$)", default):  # the block's number
        blocks = range(int(number[0]) - 1, int(number[0]) - MAX_BLOCKS, -1)
        counterparts = [f"{default[: number.start()]}{block}{default[number.end() :]}" for block in blocks]
        candidates += [name for name in counterparts if name in cells]
    return list(dict.fromkeys(candidates))


def resolve_layer_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the full layer names without duplicates. Raise `LayerError` if a name is unknown or the list is empty."""
    if isinstance(names, str) or not names:
        raise argument_error(names, "layers", "a list of one or more layer names.", LayerError)
    return list(dict.fromkeys(find_layer(unwrap(model), name).name for name in names))


def _list_by_finish(model: nn.Module, image: Tensor) -> list[str]:
    """List layers in the order in which `forward` returns. Omit a submodule if its block returns the same output."""
    names = {module: name for name, module in model.named_modules() if name}
    order: list[str] = []
    last_output: Tensor | None = None

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        nonlocal last_output
        tensor = containers.find_floating_tensor(output)
        if order and tensor is last_output and order[-1].startswith(f"{names[module]}."):
            order.pop()
        order.append(names[module])
        last_output = tensor

    with preserve_state(model), torch.no_grad(), Hooks() as hooks:
        for module in names:
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.after_forward(module, record)
        model(image)
    return order
