"""Test recommendations: on a network whose best layer is known, and every step by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import gradcam
from gradcam.cam.methods.table import METHODS
from gradcam.errors import GradcamError, InputError, LayerError
from gradcam.evaluation.intervals import Interval, mean_interval
from gradcam.evaluation.metrics.mosaic import arrange_tiles, grid_pointing_game, to_tiles
from gradcam.evaluation.metrics.perturbation import road
from gradcam.evaluation.recommendation import (
    FRACTIONS,
    Answer,
    Benchmark,
    Combination,
    CombinationExplainer,
    MosaicScores,
    Recommendation,
    Row,
    combine,
    find_best,
    find_candidates,
    find_first_equal,
    list_best,
    list_single_pass_methods,
    recommend,
    resolve_layer_names,
    subtract,
    to_rows,
)
from gradcam.evaluation.subject import Subject
from gradcam.targets import ClassTarget
from tests.colours import COLOURS, ColourNet, Turn, classifier_of, picture
from tests.helpers import assert_same, traces

PICTURES = {colour: picture(colour) for colour in COLOURS}
GRADCAM = [Combination("gradcam", "logit", layer) for layer in ("turn", "active", "colour")]


# Candidate layers


def test_candidates_of_the_embedded_model(classifier: gradcam.Classifier) -> None:
    candidates = find_candidates(classifier.model, torch.zeros(1, 3, 224, 224), classifier.layer)
    assert candidates == ["layer4", "head.0", "head.0.1", "head.0.0", "layer3"]


@pytest.mark.parametrize(
    ("name", "default", "expected"),
    [
        ("resnet18", "layer4", ["layer4", "layer4.0", "layer3"]),
        ("mobilenet_v2", "features", ["features", "features.18.1", "features.18.0", "features.17", "features.13"]),
        ("googlenet", "inception5b", ["inception5b", "inception5a", "maxpool4", "inception4e"]),
    ],
)
def test_candidates_are_layers_that_the_whole_data_flow_passes(name: str, default: str, expected: list[str]) -> None:
    options: dict[str, Any] = {"init_weights": False} if name == "googlenet" else {}
    model = torchvision.models.get_model(name, weights=None, **options).eval()
    before = traces(model)
    assert find_candidates(model, torch.zeros(1, 3, 224, 224), default) == expected
    assert_same(before, traces(model))


def test_candidates_of_a_transformer_are_the_same_layer_in_the_blocks_before() -> None:
    model = torchvision.models.VisionTransformer(32, 8, num_layers=4, num_heads=2, hidden_dim=8, mlp_dim=8).eval()
    nn.init.normal_(model.heads.head.weight)
    default = "encoder.layers.encoder_layer_3.ln_1"
    expected = [f"encoder.layers.encoder_layer_{block}.ln_1" for block in (3, 2, 1)]
    assert find_candidates(model, torch.zeros(1, 3, 32, 32), default) == expected


def test_a_default_that_is_not_among_the_last_is_a_candidate_all_the_same(classifier: gradcam.Classifier) -> None:
    candidates = find_candidates(classifier.model, torch.zeros(1, 3, 64, 64), "layer2")
    assert candidates == ["layer2", "head.0", "head.0.1", "head.0.0", "layer4", "layer3"]


def test_layers_are_checked(classifier: gradcam.Classifier) -> None:
    assert resolve_layer_names(classifier.model, ["layer4", "head.0", "layer4"]) == ["layer4", "head.0"]
    for wrong in ([], "layer4", ["layer44"]):
        with pytest.raises(LayerError, match=r"expected a list of one or more|no layer 'layer44'"):
            resolve_layer_names(classifier.model, wrong)
    with pytest.raises(LayerError, match="no layer 'nothing'"):
        find_candidates(classifier.model, torch.zeros(1, 3, 32, 32), "nothing")


# Combinations


def test_the_methods_are_those_of_one_forward_pass() -> None:
    assert list_single_pass_methods() == [name for name, method in METHODS.items() if method.cost == "1"]
    assert {"gradcam", "hirescam", "finercam", "eigencam"} <= set(list_single_pass_methods())
    assert not {"scorecam", "rise", "rollout", "shapleycam"} & set(list_single_pass_methods())


def test_a_method_without_a_choice_of_scores_is_there_once_for_each_layer() -> None:
    combinations = combine(["gradcam", "eigencam", "finercam"], ["logit", "contrast"], ["a", "b"])
    assert combinations == [
        Combination(method, score, layer)
        for layer in ("a", "b")
        for method, score in (("gradcam", "logit"), ("gradcam", "contrast"), ("eigencam", None), ("finercam", None))
    ]
    assert [str(combinations[i]) for i in (1, 2)] == ["gradcam of the contrast at a", "eigencam at a"]


@pytest.mark.parametrize(
    ("methods", "scores", "message"),
    [
        (["gradcan"], ["logit"], "gradcan"),
        (["legrad"], ["logit"], "legrad uses no target layer"),
        (["gradcam"], ["logits"], "expected a list of some of logit, probability, contrast"),
        (["gradcam"], "logit", "expected a list of some of"),
        (["gradcam"], [], "expected a list of some of"),
    ],
)
def test_unknown_methods_and_scores_are_said_before_anything_is_computed(
    methods: list[str], scores: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradcam.evaluation.recommendation.to_tiles", lambda *args, **options: pytest.fail("computed"))
    with pytest.raises(GradcamError, match=message):
        recommend(classifier_of(ColourNet()), PICTURES, methods=methods, scores=scores)


def test_heatmaps_are_those_of_each_combination_alone(classifier: gradcam.Classifier, photo: Any) -> None:
    images = torch.stack([classifier.prepare(photo(name)).image for name in ("koala.webp", "macaw.webp")])
    classes = torch.tensor([[105, 88], [88, 105]])
    combinations = combine(["gradcam", "finercam", "layercam", "eigencam"], ["logit", "contrast"], ["head.0", "layer4"])
    heatmaps_of = dict(CombinationExplainer(classifier).explain(images, classes, combinations))
    assert heatmaps_of.keys() == set(combinations)
    for combination, heatmaps in heatmaps_of.items():
        target = ClassTarget(classes, score=combination.score or "logit")
        alone = gradcam.explain(classifier.model, images, combination.layer, method=combination.method, target=target)
        torch.testing.assert_close(heatmaps, alone.heatmaps, rtol=0, atol=1e-5, msg=str(combination))


class Forked(ColourNet):
    """A network with a dead branch, and with a layer whose grid is too fine for some methods."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Upsample(scale_factor=8)
        self.dead = Turn()

    def forward(self, x: Tensor) -> Tensor:
        dead = self.dead(x - 10).relu()  # always zero
        return super().forward(self.fine(x)) + dead.mean((1, 2, 3))[:, None]


def test_a_blind_layer_has_blank_maps_and_what_has_none_is_left_out() -> None:
    images = torch.stack([picture("red")])
    combinations = combine(["gradcam", "kpcacam"], ["logit"], ["turn", "fine", "dead"])
    trials = CombinationExplainer(classifier_of(Forked()))
    heatmaps_of = dict(trials.explain(images, torch.tensor([[0, 1]]), combinations))
    too_fine = [Combination("kpcacam", None, layer) for layer in ("turn", "fine")]
    assert list(trials.left_out) == too_fine
    assert all("takes at most 1024" in reason for reason in trials.left_out.values())
    assert list(heatmaps_of) == [combination for combination in combinations if combination not in too_fine]
    blank = heatmaps_of[Combination("gradcam", "logit", "dead")]
    assert torch.equal(blank, torch.zeros(1, 2, 8, 8))
    assert heatmaps_of[Combination("gradcam", "logit", "turn")][0, 0].max() == 1
    assert dict(trials.explain(images, torch.tensor([[0, 1]]), combinations)).keys() == heatmaps_of.keys()


# Ranking


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def make_game(order: dict[Combination, Tensor], hits: dict[Combination, Tensor] | None = None) -> MosaicScores:
    ones = {combination: torch.ones_like(values) for combination, values in order.items()}
    return MosaicScores(order, ones, hits or ones)


def test_combinations_with_the_same_numbers_are_twins() -> None:
    best, near, twin = (Combination("gradcam", "logit", layer) for layer in ("best", "near", "twin"))
    order = {near: values(0.9, 0.7), best: values(0.8, 0.9), twin: values(0.80001, 0.9)}
    assert find_first_equal(make_game(order)) == {near: near, best: best, twin: best}
    hits = {combination: values(1, 1) for combination in order} | {twin: values(0, 1)}
    assert find_first_equal(make_game(order, hits))[twin] == twin


def test_the_shortlist_has_the_most_first_and_the_best_of_equal_ones_is_the_default() -> None:
    combinations = [Combination("gradcam", "logit", f"{layer}") for layer in range(8)]
    means = (0.1, 0.9, 0.5, 0.7, 0.6, 0.2, 0.8, 0.90001)
    numbers = {combination: values(mean - 0.1, math.nan, mean + 0.1) for combination, mean in zip(combinations, means)}
    assert [int(best.layer) for best in list_best(numbers)] == [7, 1, 6, 3, 4]
    assert find_best(numbers, default=combinations[1]) == combinations[1]
    assert find_best(numbers, default=combinations[3]).layer in "17"


def test_rows_have_the_numbers_in_their_order() -> None:
    keys = [*GRADCAM, *(Combination("layercam", "logit", layer) for layer in ("turn", "active"))]
    pairs = dict(zip(keys, [(0.2, 0.4), (0.9, 0.7), (0.5, 0.5), (0.6, 0.6), (0.1, 0.1)]))
    hits = {key: values(*(1, 0) * 4) for key in keys}
    game = make_game({key: values(*pair * 4) for key, pair in pairs.items()}, hits)
    road_pairs = {keys[4]: (0.0, 0.1), keys[0]: (0.1, 0.3), keys[1]: (0.0, 0.2)}
    roads = {key: values(*pair * 4) for key, pair in road_pairs.items()}
    objects = {key: values(*pair * 4) / 2 for key, pair in pairs.items()}
    rows = to_rows(game, objects, roads)
    assert [keys.index(row.combination) for row in rows] == [0, 1, 4, 3, 2]
    first, second, *_, last = rows
    assert [row.order.mean for row in rows] == pytest.approx([0.3, 0.8, 0.1, 0.6, 0.5])
    assert [row.order_behind.mean for row in rows] == pytest.approx([-0.5, 0, -0.7, -0.2, -0.3])
    assert [row.objects.mean for row in rows] == pytest.approx([0.15, 0.4, 0.05, 0.3, 0.25])
    assert [(row.maximum.mean, row.mass.mean) for row in rows] == [(0.5, 1)] * 5
    assert (first.road.mean, first.road_behind.mean, second.road_behind.mean) == pytest.approx((0.2, 0, -0.1))
    assert last.road is last.road_behind is None


def test_the_best_by_chance_is_not_recommended() -> None:
    """One of a hundred equal combinations is the best by chance.

    Only a combination that differs significantly from the default, corrected for the number of comparisons, is
    recommended. That is wrong in at most 5 % of the choices.
    """
    generator = torch.Generator().manual_seed(0)
    wrong_choices = naive_choices = 0
    for _ in range(200):
        numbers = torch.randn(100, 12, generator=generator, dtype=torch.float64) + torch.randn(12, generator=generator)
        best = numbers[numbers.mean(1).argmax()]
        wrong_choices += subtract(best, numbers[0], level=1 - 0.05 / 99).low > 0
        naive_choices += subtract(best, numbers[0]).low > 0
    assert wrong_choices <= 10
    assert naive_choices > 40  # without the correction for multiple comparisons


# Whole recommendations

# With fewer than eight images, the default is recommended.
EIGHT_IMAGES = PICTURES | {f"{colour} too": picture(colour, strength=0.9) for colour in COLOURS[:2]}


@pytest.fixture(scope="module")
def recommendation() -> Recommendation:
    return recommend(classifier_of(ColourNet()), EIGHT_IMAGES, methods=["gradcam", "eigencam"], mosaics=8)


def test_the_layer_that_knows_where_the_colours_are_is_recommended(recommendation: Recommendation) -> None:
    answer = recommendation.several_objects
    assert answer.is_clear
    assert answer.row is answer.leader
    assert (answer.row.combination.method, answer.row.combination.layer) == ("gradcam", "active")
    assert (answer.row.order.mean, answer.row.mass.mean, answer.row.maximum.mean) == pytest.approx((1, 1, 1), abs=1e-6)
    assert recommendation.default.combination == GRADCAM[0]
    # At the default layer, a class's map lies in the opposite cell. Its own cell equals two of the others, and is less
    # than one.
    assert (recommendation.default.order.mean, recommendation.default.mass.mean) == pytest.approx((1 / 3, 0), abs=1e-6)
    assert (answer.gain.mean, answer.gain.low) == pytest.approx((2 / 3, 2 / 3), abs=1e-6)
    assert (recommendation.mosaics, recommendation.size, set(recommendation.images)) == (8, (16, 16), set(EIGHT_IMAGES))


def test_every_combination_has_a_row(recommendation: Recommendation) -> None:
    expected = combine(["gradcam", "eigencam"], ["logit", "probability", "contrast"], ["turn", "active"])
    assert {row.combination for row in recommendation.rows} == set(expected)
    class_agnostic = [row for row in recommendation.rows if row.combination.method == "eigencam"]
    assert [row.order.mean for row in class_agnostic] == pytest.approx([0.5] * 2, abs=0.1)
    assert all(row.order.n == 8 for row in recommendation.rows)


def test_the_numbers_are_those_of_the_metrics_themselves(recommendation: Recommendation) -> None:
    classifier = classifier_of(ColourNet())
    mosaics = arrange_tiles(classifier.model, to_tiles(classifier, EIGHT_IMAGES), limit=8)
    for combination in (Combination("gradcam", "contrast", "active"), Combination("eigencam", None, "active")):
        numbers: dict[str, list[Tensor]] = {name: [] for name in EIGHT_IMAGES}
        for mosaic in mosaics:
            target = ClassTarget([list(mosaic.classes)], score=combination.score or "logit")
            options: Any = {"method": combination.method, "target": target}
            game = grid_pointing_game(gradcam.explain(classifier.model, mosaic.image[None], "active", **options))
            for name, *metrics in zip(mosaic.names, game.order[0], game.mass[0], game.hits[0], strict=True):
                numbers[name].append(torch.stack(metrics).double())
        means = torch.stack([torch.stack(number).mean(0) for number in numbers.values()])
        (row,) = (row for row in recommendation.rows if row.combination == combination)
        for interval, expected in zip((row.order, row.mass, row.maximum), means.T, strict=True):
            assert vars(interval) == pytest.approx(vars(mean_interval(expected.tolist())))
    images = torch.stack(list(EIGHT_IMAGES.values()))
    subject = Subject(classifier.model, images)
    explained = gradcam.explain(classifier.model, images, "turn", target=subject.classes)
    parts = (slice(0, 4), slice(4, 8))
    subjects = [Subject(classifier.model, images[part]) for part in parts]
    maps = [explained.heatmaps[part, 0] for part in parts]
    scores = [road(*part_inputs, shares=FRACTIONS).combined for part_inputs in zip(subjects, maps)]
    combined = torch.cat(scores).mean()
    assert recommendation.default.road.mean == pytest.approx(float(combined), abs=1e-6)


def test_where_objects_are_annotated_their_order_says_where_one_is() -> None:
    """The annotated object is the upper, brighter half of each image. Only maps at "active" lie there."""
    halves = {name: image.clone() for name, image in EIGHT_IMAGES.items()}
    for image in halves.values():
        image[:, 4:] *= 0.5
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:4] = True
    objects: dict[str, dict[int, Any]] = {name: {COLOURS.index(name.split()[0]): mask.numpy()} for name in halves}
    options: Any = {"methods": ["gradcam"], "scores": ["logit"], "mosaics": 4, "min_probability": 0}
    classifier = classifier_of(ColourNet())
    result = recommend(classifier, halves, objects=objects, **options)
    assert (result.single_object.measure, result.several_objects.measure) == ("objects", "order")
    assert result.single_object.row.combination == GRADCAM[1]
    assert (result.single_object.row.objects.mean, result.default.objects.mean) == (1, 0)
    # Seven annotated images are too few. Annotations of a class that is not explained do not count.
    objects["red"] = {COLOURS.index("blue"): mask}
    without = recommend(classifier, halves, objects=objects, **options)
    assert without.single_object.measure == "road"
    assert all(row.objects is None for row in without.rows)


def test_the_default_stays_where_the_best_is_unfaithful_or_not_told_apart() -> None:
    row = Row(GRADCAM[0], *[mean_interval([0.5] * 8)] * 4)
    clear, unclear = Interval(0.1, 0.05, 0.15, 8), Interval(0.1, -0.05, 0.25, 8)
    below = Interval(-0.1, -0.15, -0.05, 8)
    cases = [(clear, unclear, True), (clear, below, False), (unclear, clear, False), (None, None, True)]
    for gain, road_gain, is_clear in cases:
        assert Answer(row, row, "order", gain, road_gain).is_clear is is_clear


def test_mass_and_maxima_are_told_apart() -> None:
    classifier = classifier_of(ColourNet())
    tiles = to_tiles(classifier, {colour: PICTURES[colour] for colour in COLOURS[:4]})
    (mosaic,) = arrange_tiles(classifier.model, tiles)
    combination = Combination("eigencam", None, "colour")
    scores = Benchmark(CombinationExplainer(classifier), tiles, [mosaic], 0).score_mosaics([combination])
    mass, hits = scores.mass, scores.hits
    target = [list(mosaic.classes)]
    explained = gradcam.explain(classifier.model, mosaic.image[None], "colour", method="eigencam", target=target)
    game = grid_pointing_game(explained)
    order = [mosaic.names.index(tile.name) for tile in tiles]
    torch.testing.assert_close(mass[combination], game.mass[0, order].double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(hits[combination], game.hits[0, order].double(), rtol=0, atol=1e-6)
    assert (mass[combination] - hits[combination]).abs().max() > 0.01


def test_road_is_measured_with_the_seed() -> None:
    classifier = classifier_of(ColourNet())
    pale = {colour: picture(colour, strength=0.5) for colour in COLOURS[:4]}
    tiles = to_tiles(classifier, pale, least=0)
    scores = Benchmark(CombinationExplainer(classifier), tiles, (), 7).score_road([GRADCAM[1]])[GRADCAM[1]]
    images = torch.stack([tile.image for tile in tiles])
    subject = Subject(classifier.model, images)
    heatmaps = gradcam.explain(classifier.model, images, "active", target=subject.classes).heatmaps[:, 0]
    seven, eight = (road(subject, heatmaps, shares=FRACTIONS, seed=seed).combined.double() for seed in (7, 8))
    torch.testing.assert_close(scores, seven, rtol=0, atol=1e-7)
    assert (scores - eight).abs().max() > 1e-5


def test_gains_are_the_leaders_numbers_minus_the_defaults() -> None:
    pale = {name: image * 0.5 for name, image in EIGHT_IMAGES.items()}
    for image in pale.values():
        image[:, 4:] *= 0.5  # one half has more evidence than the other
    options: Any = {"methods": ["gradcam"], "scores": ["logit"], "layers": ["active"]}
    result = recommend(classifier_of(ColourNet()), pale, **options, min_probability=0)
    answer = result.single_object
    assert answer.measure == "road"
    assert answer.leader.road.mean > result.default.road.mean + 0.01
    assert answer.gain.mean == pytest.approx(answer.leader.road.mean - result.default.road.mean)
    assert result.default.road_behind.mean == pytest.approx(-answer.gain.mean)


def test_the_same_seed_gives_the_same_to_the_last_digit(recommendation: Recommendation) -> None:
    torch.manual_seed(99)
    options: Any = {"methods": ["gradcam", "eigencam"], "mosaics": 8}
    again, reseeded = (recommend(classifier_of(ColourNet()), EIGHT_IMAGES, **options, seed=seed) for seed in (0, 1))
    assert json.dumps(again.to_dict()) == json.dumps(recommendation.to_dict())
    assert json.dumps(reseeded.to_dict()["rows"]) != json.dumps(recommendation.to_dict()["rows"])


def test_of_fewer_than_eight_pictures_the_default_is_recommended() -> None:
    """With too few images the default is recommended, however clear the difference looks."""
    result = recommend(classifier_of(ColourNet()), PICTURES, methods=["gradcam"], scores=["logit"], mosaics=4)
    for answer in (result.single_object, result.several_objects):
        assert answer.row is result.default
        assert not answer.gain.is_known
    assert result.several_objects.leader.combination == GRADCAM[1]
    assert result.several_objects.gain.mean == pytest.approx(2 / 3)


def test_the_default_is_recommended_where_nothing_is_better() -> None:
    result = recommend(classifier_of(ColourNet(), "active"), EIGHT_IMAGES, methods=["hirescam"], scores=["logit"])
    for answer in (result.single_object, result.several_objects):
        assert answer.row is answer.leader is result.default
        assert (answer.gain.mean, answer.gain.low, answer.gain.high) == (0, 0, 0)
    assert result.default.combination == Combination("gradcam", "logit", "active")


def test_the_progress_ends_with_all_steps() -> None:
    messages: list[tuple[int, int]] = []
    options: Any = {"methods": ["gradcam"], "scores": ["logit"], "layers": ["turn", "active"], "mosaics": 3}
    recommend(classifier_of(ColourNet()), PICTURES, **options, progress=lambda *step: messages.append(step))
    assert [step for step, _ in messages] == list(range(1, len(messages) + 1))
    assert messages[-1] == (3 + 2 * 2, 3 + 2 * 2)  # mosaics, and two combinations with two batches of ROAD each


def test_a_default_without_a_map_is_said_and_the_rest_goes_on() -> None:
    model = Forked()
    result = recommend(classifier_of(model, "dead"), EIGHT_IMAGES, methods=["gradcam"], layers=["active"], mosaics=8)
    assert result.several_objects.row.combination.layer == "active"
    assert (result.default.order.mean, result.default.mass.mean) == (0.5, 0)
    with pytest.raises(LayerError, match="head"):
        recommend(classifier_of(model, "head"), PICTURES, methods=["gradcam"], layers=["head"], mosaics=2)
    without = recommend(classifier_of(model, "head"), PICTURES, methods=["gradcam"], layers=["active"], mosaics=2)
    assert without.default is without.single_object.gain is without.several_objects.road_gain is None
    assert without.several_objects.row.combination.layer == "active"
    assert [combination.layer for combination in without.left_out] == ["head"]
    assert without.to_dict()["left_out"][0]["method"] == "gradcam"


def test_too_few_classes_and_layers_that_are_not_there_are_errors() -> None:
    classifier = classifier_of(ColourNet())
    with pytest.raises(InputError, match="are used: they have 2 classes"):
        recommend(classifier, {colour: PICTURES[colour] for colour in ("red", "blue")})
    with pytest.raises(LayerError, match="no layer 'activ'"):
        recommend(classifier, PICTURES, layers=["activ"])
    with pytest.raises(GradcamError, match="mosaics"):
        recommend(classifier, PICTURES, mosaics=0)


@pytest.mark.slow
def test_the_embedded_model_points_at_pictures_it_was_not_tuned_on(classifier: gradcam.Classifier, photo: Any) -> None:
    """Use the half of the assets that `scripts/choose_defaults` measures on."""
    names = ["camera.png", "chelsea.jpg", "lemur.webp", "macaw.webp", "polar_bear.webp"]
    tiles = to_tiles(classifier, {name: photo(name) for name in names}, least=0.25)
    contest = Benchmark(CombinationExplainer(classifier), tiles, arrange_tiles(classifier.model, tiles), 0)
    default = Combination("gradcam", "logit", "layer4")
    game = contest.score_mosaics([default])
    assert len(contest.mosaics) == 5
    assert game.order[default].mean() >= 0.80
    assert game.hits[default].mean() >= 0.97
