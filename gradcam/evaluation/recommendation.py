"""Which method, score and layer to explain a model with: tried out on somebody's own pictures."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradcam.cam.explain import compare
from gradcam.cam.forward import find_layers_with_grid
from gradcam.cam.listing import list_layers
from gradcam.cam.methods.base import Method
from gradcam.cam.methods.table import METHODS, find_methods
from gradcam.errors import BlindLayerError, GradcamError, GradcamWarning, LayerError, shorten, show_fields
from gradcam.evaluation.explainers import Counter
from gradcam.evaluation.intervals import ENOUGH, LEVEL, Interval, mean_interval, paired_difference
from gradcam.evaluation.metrics.grid import LEAST, Mosaic, Tile, arrange, find_tiles, grid_pointing_game
from gradcam.evaluation.metrics.localisation import order_pointing_game
from gradcam.evaluation.metrics.perturbation import road
from gradcam.evaluation.subject import Subject, to_tensor
from gradcam.hooks import nested
from gradcam.hooks.hooks import Hooks
from gradcam.hooks.preserve import preserve_state
from gradcam.layers.find import find_layer, unwrap
from gradcam.models.classifier import Classifier
from gradcam.models.device import find_input_dtype
from gradcam.options import SCORES, Progress, accept_old_parameters, keep_old_names
from gradcam.renames import RECOMMEND, add_old_keys
from gradcam.targets.classes import ClassTarget

MOSAICS = 12
SHORTLIST = 5  # combinations of each question that ROAD is measured of, beside the default
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the pixels that ROAD imputes
PICTURES = 4  # in one run of ROAD
SAME = 1e-4  # differences that make none
LAST = 4  # layers of the coarsest grid, counted from the end
BLOCKS = 3  # of a model with one grid all along, such as a transformer, the last ones


@dataclass(frozen=True)
class Combination:
    """A method, the score that it explains, and a layer. `score`: None where the method has its own, or none."""

    method: str
    score: str | None
    layer: str

    def __str__(self) -> str:
        return f"{self.method}{f' of the {self.score}' if self.score else ''} at {self.layer}"


Maps = Iterator[tuple[Combination, Tensor]]  # heatmaps (N,K,H,W)
Values = Mapping[Combination, Tensor]  # float64 (P,): one number for each picture, NaN for none
Objects = Mapping[str, Mapping[int, Any]]  # by picture and class a mask, bool (H,W)


@dataclass(frozen=True)
class Row:
    """One combination's numbers, as means over pictures with their intervals. `order`, `mass`, `maximum`: of the grid
    pointing game, a picture's being its mean over its mosaics. `order_behind`: the order minus the most, picture by
    picture. `objects`: the order on annotated objects of single pictures, None without any. `road`: of single pictures,
    None where it was not measured of all; `road_behind`: the same minus the best one's."""

    combination: Combination
    order: Interval
    order_behind: Interval
    mass: Interval
    maximum: Interval
    objects: Interval | None = None
    road: Interval | None = None
    road_behind: Interval | None = None

    __repr__ = show_fields


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
        The mean difference, leader minus default, image by image. Its confidence level is 95 % for all combinations
        together, because the leader was chosen among them. None if the default cannot be used.
    road_gain : Interval or None
        The leader's ROAD minus the default's, at 95 %.

    Examples
    --------
    >>> import gradcam
    >>> images = {"both": "photo.jpg", "cup": "photos/coffee.jpg", "rocket": "photos/rocket.jpg", "man": "other.png"}
    >>> few = {"methods": ["gradcam"], "scores": ["logit"], "layers": ["layer4"], "min_probability": 0.2}
    >>> found = gradcam.evaluation.recommend(gradcam.load_classifier(), images, **few)
    >>> answer: gradcam.evaluation.Answer = found.several_objects
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
        """Whether the leader is significantly better than the default."""
        return self.gain is None or (self.gain.low > SAME and not self.is_unfaithful)

    @property
    def is_unfaithful(self) -> bool:
        """Whether the leader's ROAD is significantly lower than the default's."""
        return self.road_gain is not None and self.road_gain.high < -SAME

    def to_dict(self) -> dict[str, Any]:
        """Return the recommendation as dicts, strings and numbers, ready for JSON."""
        record = {
            **vars(self.row.combination),
            "measure": self.measure,
            "leader": {**vars(self.leader.combination)},
            **{name: (gain := getattr(self, name)) and gain.to_fields() for name in ("gain", "road_gain")},
        }
        return add_old_keys(RECOMMEND, record)


@keep_old_names
@dataclass(frozen=True)
class Recommendation:
    """The best combinations of method, score and layer for a model on your images, for two questions.

    Attributes
    ----------
    model : str
        The classifier's name.
    rows : tuple of Row
        All combinations. The combinations with a ROAD score come first, sorted by ROAD. The rest are sorted by `order`.
        The highest values come first.
    single_object : Answer
        Where is the object? The measure is `objects` if there are enough annotations, otherwise ROAD.
    several_objects : Answer
        Which of several objects belongs to the class? The measure is `order` in mosaics.
    default : Row or None
        The default combination; None if it cannot be used.
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
    >>> found = gradcam.evaluation.recommend(gradcam.load_classifier(), images, **few)
    >>> found.single_object.row is found.default, found.to_dict()["mosaics"]
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
        one, several = (f"{it.combination}{', the default' if it is self.default else ''}" for it in rows)
        found = f"the best of {len(self.rows)} combinations on {len(self.images)} image(s) in {self.mosaics} mosaic(s)"
        return f"Recommendation(one object: {one}; which of several: {several}; for {self.model}: {found})"

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
                vars(row.combination) | {it: (found := getattr(row, it)) and found.to_fields() for it in numbers}
                for row in self.rows
            ],
            "left_out": [{**vars(it), "reason": reason} for it, reason in self.left_out.items()],
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
    mosaics: int = MOSAICS,
    min_probability: float = LEAST,
    seed: int = 0,
    reshape: Any = None,
    progress: Progress | None = None,
) -> Recommendation:
    """Find the best method, score and layer for two questions about your images. Annotations are optional.

    *Which of several objects belongs to the class?* In mosaics of four images, `order` measures how often the heatmap is
    higher at a pixel of the class's image than at a pixel of the other three. *Where is the object?* In single images,
    ROAD measures how much the marked pixels matter to the model. It is computed for the five best combinations of the
    first question. With annotations, `objects` replaces ROAD: it measures how often the heatmap is higher at a pixel of
    the object than outside it. `mass` is listed but not used, since sharpening increases it.

    Among many combinations, the best one wins partly by chance. The default, Grad-CAM of the logit at the classifier's
    layer, is therefore kept unless the leader is significantly better in a paired comparison (Bonferroni, 5 %, all
    combinations) and its ROAD is not significantly lower. With fewer than 8 images, the default is always kept.
    Combinations with the same heatmaps share their numbers.

    Parameters
    ----------
    classifier : Classifier
        The model.
    images : mapping of str to image
        The images by name, as in `make_mosaics`.
    methods : sequence of str or Method, default None
        Methods that use a target layer. None selects all of these methods that need only one forward pass.
    scores : sequence of str, default ("logit", "probability", "contrast")
        As in `targets.ClassTarget`.
    layers : sequence of str, default None
        Layer names. None selects the classifier's layer and a few deep layers that may be better.
    objects : mapping of str to mappings of int to Tensor or array (H,W), default None
        Annotated objects: a mapping from image name to a mapping from class index to a bool mask. The mask covers the
        part of the image that the model sees. An image is left out of this measure if no object in it belongs to its top
        class.
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
        Its `single_object` and `several_objects` each have a method, a score and a layer.

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
    >>> found = gradcam.evaluation.recommend(gradcam.load_classifier(), images, **few)
    >>> found.several_objects.row.combination.layer, len(found.rows)
    ('layer4', 2)
    """
    model = classifier.model
    default = Combination("gradcam", "logit", check_layers(model, [classifier.layer])[0])
    named = None if layers is None else check_layers(model, layers)
    names = list_single_pass() if methods is None else methods
    combine(names, scores, [default.layer])  # so that what is wrong with these is said before anything is computed
    tiles = find_tiles(classifier, images, least=min_probability)
    arranged = arrange(model, tiles, limit=mosaics, seed=seed)
    chosen = named or find_candidates(model, to_batch(classifier, [tiles[0].image]), default.layer)
    used = {name for mosaic in arranged for name in mosaic.names}
    trials = Trials(classifier, reshape, {method.name: method for method in find_methods(names)})
    counter = Counter(progress)
    contest = Contest(trials, [tile for tile in tiles if tile.name in used], arranged, seed, counter.step)
    counter.total = len(arranged) + (SHORTLIST + 1) * contest.batches
    return decide(contest, [*dict.fromkeys([default, *combine(names, scores, chosen)])], objects or {}, counter)


def decide(contest: Contest, combinations: Sequence[Combination], objects: Objects, counter: Counter) -> Recommendation:
    """Play the games and answer both questions; of the combinations the first is the default. Raises `LayerError` where
    none has a map."""
    default, left_out = combinations[0], contest.trials.left_out
    game = contest.play(combinations)
    if not game.order:
        raise LayerError(next(iter(left_out.values())))
    twins = find_twins(game)
    different = [it for it in game.order if twins[it] == it]
    on_objects = contest.point(different, objects)
    in_mosaics = list_best({it: game.order[it] for it in different})
    of_one = list_best(on_objects) if on_objects else in_mosaics
    chosen = [*dict.fromkeys([*of_one, *in_mosaics, *([twins[default]] if default in game.order else [])])]
    counter.total = counter.done + len(chosen) * contest.batches
    measured = contest.remove(chosen)
    roads = {it: measured[twins[it]] for it in game.order if twins[it] in measured}
    on_objects = {it: on_objects[twins[it]] for it in game.order if on_objects}
    rows = to_rows(game, on_objects, roads)
    by_name = {row.combination: row for row in rows}

    def answer(
        judged_by: Literal["order", "road", "objects"], values: Values, shortlist: Sequence[Combination]
    ) -> Answer:
        leader = find_best({it: values[it] for it in values if it == default or twins[it] in shortlist}, default)
        if default not in game.order:
            return Answer(by_name[leader], by_name[leader], judged_by, None, None)
        gain = subtract(values[leader], values[default], level=1 - (1 - LEVEL) / max(1, len(different) - 1))
        found = Answer(by_name[leader], by_name[leader], judged_by, gain, subtract(roads[leader], roads[default]))
        return found if found.is_clear else replace(found, row=by_name[default])

    height, width = contest.mosaics[0].image.shape[1:]
    return Recommendation(
        model=contest.trials.classifier.name,
        rows=tuple(rows),
        single_object=answer("objects", on_objects, of_one) if on_objects else answer("road", roads, of_one),
        several_objects=answer("order", game.order, in_mosaics),
        default=by_name.get(default),
        images=tuple(tile.name for tile in contest.tiles),
        mosaics=len(contest.mosaics),
        size=(int(height), int(width)),
        seed=contest.seed,
        left_out=dict(left_out),
    )


def list_single_pass() -> list[str]:
    """The methods at a layer that take one forward pass of the model, and one backwards."""
    return [method.name for method in METHODS.values() if method.cost == "1" and method.place == "layer"]


def combine(methods: Sequence[str | Method], scores: Sequence[str], layers: Sequence[str]) -> list[Combination]:
    """All combinations, each once. Methods that explain no score, or their own, are there once for each layer. Raises
    `GradcamError` for unknown methods and scores, and for methods that look at no layer."""
    found = find_methods(methods)
    for method in found:
        if method.place != "layer":
            raise GradcamError(f"{method.name} uses no target layer: leave it out.")
    if isinstance(scores, str) or not scores or not all(score in SCORES for score in scores):
        raise GradcamError(f"scores is {shorten(scores)}, expected a list of some of {', '.join(SCORES)}.")
    without = {it.name for it in found if it.score is not None or it.needs == ("activations",)}
    each = product(layers, [method.name for method in found], scores)
    return [*dict.fromkeys(Combination(name, None if name in without else score, layer) for layer, name, score in each)]


@dataclass
class Trials:
    """What explains images in every way that is asked for. `left_out`: what turned out to have no map, and why.
    `methods`: by the names that combinations have; others are those of `METHODS`."""

    classifier: Classifier
    reshape: Any = None
    methods: Mapping[str, Method] = field(default_factory=dict)
    left_out: dict[Combination, str] = field(default_factory=dict)

    def explain(self, images: Tensor, classes: Tensor, combinations: Iterable[Combination]) -> Maps:
        """Each combination, and its heatmaps (N,K,H,W) in [0,1] of images (N,C,H,W) for classes (N,K). There is a pass
        for each score, and only its heatmaps are in memory. One is blank where the gradient at its layer is exactly
        zero. A combination that has no map at all is left out, here and from now on."""
        wanted = [it for it in combinations if it not in self.left_out]
        for score in SCORES:
            # Methods without a score go with the logits' pass.
            if part := [it for it in wanted if (it.score or "logit") == score]:
                yield from self._explain(images, classes, score, part)

    def _explain(self, images: Tensor, classes: Tensor, score: str, wanted: Sequence[Combination]) -> Maps:
        layers = list(dict.fromkeys(it.layer for it in wanted))
        methods = [self.methods.get(name, name) for name in dict.fromkeys(it.method for it in wanted)]
        target = ClassTarget(classes, score=score, activation=self.classifier.activation)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", GradcamWarning)  # whatever suits a method is found out here
                model, reshape = self.classifier.model, self.reshape
                found = compare(model, images, layers=layers, methods=methods, target=target, reshape=reshape)
        except LayerError as error:
            if len(wanted) > 1:  # one of them is the reason: each by itself
                for it in wanted:
                    yield from self._explain(images, classes, score, [it])
            elif isinstance(error, BlindLayerError):
                yield wanted[0], images.new_zeros(*classes.shape, *images.shape[2:])
            else:
                self.left_out[wanted[0]] = str(error)
        else:
            yield from ((it, found[it.layer, it.method].heatmaps) for it in wanted)


@dataclass(frozen=True, eq=False)
class Game:
    """The grid pointing game of each combination, a picture's numbers being its means over the mosaics that it is in."""

    order: Values
    mass: Values
    hits: Values


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
        return -(-len(self.tiles) // PICTURES)

    def play(self, combinations: Sequence[Combination]) -> Game:
        """The grid pointing game."""
        places = {tile.name: place for place, tile in enumerate(self.tiles)}
        sums = {it: torch.zeros(3, len(places), dtype=torch.float64, device="cpu") for it in combinations}
        counts = torch.zeros(len(places), dtype=torch.float64, device="cpu")
        for mosaic in self.mosaics:
            at = [places[name] for name in mosaic.names]
            counts[at] += 1
            image = to_batch(self.trials.classifier, [mosaic.image])
            classes = torch.tensor([mosaic.classes], dtype=torch.int64, device=image.device)
            for it, heatmaps in self.trials.explain(image, classes, combinations):
                found = grid_pointing_game(heatmaps)
                sums[it][:, at] += torch.cat([found.order, found.mass, found.hits]).cpu().double()
            self.step()
        means = {it: sums[it] / counts for it in combinations if it not in self.trials.left_out}
        return Game(*({it: mean[part] for it, mean in means.items()} for part in range(3)))

    def point(self, combinations: Sequence[Combination], objects: Objects) -> Values:
        """The order on annotated objects, NaN for pictures without any of their class; nothing of fewer than `ENOUGH`."""
        masks = {tile.name: objects.get(tile.name, {}).get(tile.index) for tile in self.tiles}
        if sum(mask is not None for mask in masks.values()) < ENOUGH:
            return {}
        values = {it: torch.full((len(masks),), math.nan, dtype=torch.float64, device="cpu") for it in combinations}
        for place, tile in enumerate(self.tiles):
            if (mask := masks[tile.name]) is not None:
                image = to_batch(self.trials.classifier, [tile.image])
                classes = torch.tensor([[tile.index]], dtype=torch.int64, device=image.device)
                for it, heatmaps in self.trials.explain(image, classes, combinations):
                    values[it][place] = float(order_pointing_game(heatmaps[:, 0], to_tensor(mask)[None]))
        return {it: found for it, found in values.items() if it not in self.trials.left_out}

    def remove(self, combinations: Sequence[Combination]) -> Values:
        """ROAD of each picture alone, for its class, at the network's own size."""
        classifier = self.trials.classifier
        values: dict[Combination, list[Tensor]] = {it: [] for it in combinations}
        for start in range(0, len(self.tiles), PICTURES):
            part = self.tiles[start : start + PICTURES]
            images, classes = to_batch(classifier, [tile.image for tile in part]), [tile.index for tile in part]
            subject = Subject(classifier.model, images, classes, activation=classifier.activation)
            for it, heatmaps in self.trials.explain(images, subject.classes[:, None], combinations):
                values[it].append(road(subject, heatmaps[:, 0], shares=SHARES, seed=self.seed).combined.cpu().double())
                self.step()
        return {it: torch.cat(parts) for it, parts in values.items() if parts}


def to_batch(classifier: Classifier, images: Sequence[Tensor]) -> Tensor:
    """Images (C,H,W) as the model takes them, (N,C,H,W)."""
    return torch.stack(list(images)).to(classifier.device, find_input_dtype(classifier.model))


def subtract(values: Tensor, reference: Tensor, *, level: float = LEVEL) -> Interval:
    """The mean difference, and its interval over pictures; without one of fewer than `ENOUGH`."""
    found = paired_difference(values.tolist(), reference.tolist(), level=level)
    return found if found.n >= ENOUGH else replace(found, low=-math.inf, high=math.inf)


def find_twins(game: Game) -> dict[Combination, Combination]:
    """For each combination the first with the same numbers in all pictures, whose maps are the same then. Where the
    model is linear behind a layer, several methods are one."""
    twins: dict[Combination, Combination] = {}
    numbers = {it: torch.cat([game.order[it], game.mass[it], game.hits[it]]) for it in game.order}
    for it, own in numbers.items():
        first = next((one for one in twins if (numbers[one] - own).abs().max() <= SAME), it)
        twins[it] = twins.get(first, first)
    return twins


def find_best(values: Values, default: Combination) -> Combination:
    """The combination with the most on average, over the pictures that have a number; of equal ones the default, or the
    first."""
    return max(values, key=lambda it: (round(float(values[it].nanmean()) / SAME), it == default))


def list_best(values: Values) -> list[Combination]:
    """The shortlist: the combinations with the most on average, in their order."""
    return sorted(values, key=lambda it: -float(values[it].nanmean()))[:SHORTLIST]


def to_rows(game: Game, objects: Values, roads: Values) -> list[Row]:
    """All combinations' rows: those with a ROAD by that, then those without by their order."""
    most = max(game.order, key=lambda it: float(game.order[it].mean()))
    best = max(roads, key=lambda it: float(roads[it].mean()), default=most)

    def mean(values: Values, it: Combination) -> Any:
        return mean_interval(values[it].tolist()) if it in values else None

    rows = [
        Row(
            it,
            order=mean(game.order, it),
            order_behind=subtract(game.order[it], game.order[most]),
            mass=mean(game.mass, it),
            maximum=mean(game.hits, it),
            objects=mean(objects, it),
            road=mean(roads, it),
            road_behind=subtract(roads[it], roads[best]) if it in roads else None,
        )
        for it in game.order
    ]
    return sorted(rows, key=lambda row: (row.road is None, -(row.road or row.order).mean))


def find_candidates(model: nn.Module, image: Tensor, default: str) -> list[str]:
    """Layers at which a map can be taken and may be better than at `default`, which comes first; seven or fewer.

    Read off passes of `image` (1,C,H,W), in the order in which the layers end. These are
    - of the coarsest grid the last four that all goes through, such as a ReLU, the norm and the convolution before it, and
      the last block: the model's own parts and those of `nn.Sequential` ones, no branches, and none in the first quarter;
    - of the next finer grid the least nested one, the last of these: the block before, and no part of a block;
    - where there is one grid all along, as in a transformer: the same layer as `default` in the two blocks before.
    Of a block and its last part, which gives the same, it is the block.

    Raises `LayerError` for an unknown default, and where there is no layer with a grid.
    """
    model = unwrap(model)
    default = find_layer(model, default).name
    with_grid = set(find_layers_with_grid(model, nested.to_batch(image)))
    listed = [row for row in list_layers(model, image) if row.cam and not row.is_out_of_place]
    places = {row.name: math.prod(row.grid) for row in listed if row.grid and row.name in with_grid}
    ended = _list_ended(model, image)
    coarse, *fine = sorted(set(places.values())) or [0]
    late = [name for name in ended[len(ended) // 4 :] if places.get(name) == coarse]
    around = {name: [name[: dot.start()] for dot in re.finditer(r"\.", name)] for name in late}
    straight = [name for name in late if all(isinstance(model.get_submodule(it), nn.Sequential) for it in around[name])]
    found = [default, *straight[::-1][:LAST]]
    if fine:
        finer = [name for name in reversed(ended) if places.get(name) == fine[0]]
        found += sorted(finer, key=lambda name: name.count("."))[:1]
    elif number := re.search(r"\d+(?=\.|$)", default):  # the first, which is the block's
        blocks = range(int(number[0]) - 1, int(number[0]) - BLOCKS, -1)
        alike = [f"{default[: number.start()]}{block}{default[number.end() :]}" for block in blocks]
        found += [name for name in alike if name in places]
    return list(dict.fromkeys(found))


def check_layers(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The layers' full names, each once. Raises `LayerError` for an unknown one, and where there are none."""
    if isinstance(names, str) or not names:
        raise LayerError(f"layers is {names!r}, expected a list of one or more layer names.")
    return list(dict.fromkeys(find_layer(unwrap(model), name).name for name in names))


def _list_ended(model: nn.Module, image: Tensor) -> list[str]:
    """The layers in the order in which they end; the last part of a block gives way to the block that returns its output."""
    names = {module: name for name, module in model.named_modules() if name}
    ended: list[str] = []
    last: Tensor | None = None

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        nonlocal last
        tensor = nested.first_floating(output)
        if ended and tensor is last and ended[-1].startswith(f"{names[module]}."):
            ended.pop()
        ended.append(names[module])
        last = tensor

    with preserve_state(model), torch.no_grad(), Hooks() as hooks:
        for module in names:
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.after_forward(module, note)
        model(image)
    return ended
