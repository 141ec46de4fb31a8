"""What is recommended: on a network whose best layer is known, and every step towards it on numbers worked by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import gradcam
from gradcam.cam.methods.table import METHODS
from gradcam.errors import GradcamError, InputError, LayerError
from gradcam.evaluation.intervals import mean_interval
from gradcam.evaluation.metrics.grid import arrange, find_tiles, grid_pointing_game
from gradcam.evaluation.metrics.perturbation import road
from gradcam.evaluation.recommendation import (
    SHARES,
    Combination,
    Contest,
    Recommendation,
    Trials,
    check_layers,
    combine,
    find_best,
    find_candidates,
    find_most,
    find_twins,
    list_best,
    list_single_pass,
    recommend,
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
    found = find_candidates(classifier.model, torch.zeros(1, 3, 224, 224), classifier.layer)
    assert found == ["layer4", "head.0", "head.0.1", "head.0.0", "layer3"]


@pytest.mark.parametrize(
    ("name", "default", "expected"),
    [
        ("resnet18", "layer4", ["layer4", "layer4.0", "layer3"]),
        ("mobilenet_v2", "features", ["features", "features.18.1", "features.18.0", "features.17", "features.13"]),
        ("googlenet", "inception5b", ["inception5b", "inception5a", "maxpool4", "inception4e"]),
    ],
)
def test_candidates_are_what_all_goes_through_and_no_branches(name: str, default: str, expected: list[str]) -> None:
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
    found = find_candidates(classifier.model, torch.zeros(1, 3, 64, 64), "layer2")
    assert found == ["layer2", "head.0", "head.0.1", "head.0.0", "layer4", "layer3"]


def test_layers_are_checked(classifier: gradcam.Classifier) -> None:
    assert check_layers(classifier.model, ["layer4", "head.0", "layer4"]) == ["layer4", "head.0"]
    for wrong in ([], "layer4", ["layer44"]):
        with pytest.raises(LayerError, match=r"expected a list of at least one|no layer 'layer44'"):
            check_layers(classifier.model, wrong)
    with pytest.raises(LayerError, match="no layer 'nothing'"):
        find_candidates(classifier.model, torch.zeros(1, 3, 32, 32), "nothing")


# Combinations


def test_the_methods_are_those_of_one_forward_pass() -> None:
    assert list_single_pass() == [name for name, method in METHODS.items() if method.cost == "1"]
    assert {"gradcam", "hirescam", "finercam", "eigencam"} <= set(list_single_pass())
    assert not {"scorecam", "rise", "rollout", "shapleycam"} & set(list_single_pass())


def test_a_method_without_a_choice_of_scores_is_there_once_for_each_layer() -> None:
    found = combine(["gradcam", "eigencam", "finercam"], ["logit", "contrast"], ["a", "b"])
    assert found == [
        Combination(method, score, layer)
        for layer in ("a", "b")
        for method, score in (("gradcam", "logit"), ("gradcam", "contrast"), ("eigencam", None), ("finercam", None))
    ]
    assert list(map(str, found[:3])) == ["gradcam of the logit at a", "gradcam of the contrast at a", "eigencam at a"]


@pytest.mark.parametrize(
    ("methods", "scores", "message"),
    [
        (["gradcan"], ["logit"], "gradcan"),
        (["rise"], ["logit"], "rise looks at no layer"),
        (["legrad"], ["logit"], "legrad looks at no layer"),
        (["gradcam"], ["logits"], "expected some of logit, probability, contrast"),
        (["gradcam"], "logit", "expected some of"),
        (["gradcam"], [], "expected some of"),
    ],
)
def test_unknown_methods_and_scores_are_said_before_anything_is_computed(
    methods: list[str], scores: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradcam.evaluation.recommendation.find_tiles", lambda *args, **named: pytest.fail("computed"))
    with pytest.raises(GradcamError, match=message):
        recommend(classifier_of(ColourNet()), PICTURES, methods=methods, scores=scores)


def test_heatmaps_are_those_of_each_combination_alone(classifier: gradcam.Classifier, photo: Any) -> None:
    images = torch.stack([classifier.prepare(photo(name)).image for name in ("koala.webp", "macaw.webp")])
    classes = torch.tensor([[105, 88], [88, 105]])
    wanted = combine(["gradcam", "finercam", "layercam", "eigencam"], ["logit", "contrast"], ["head.0", "layer4"])
    found = dict(Trials(classifier).explain(images, classes, wanted))
    assert found.keys() == set(wanted)
    for it, heatmaps in found.items():
        target = ClassTarget(classes, score=it.score or "logit")
        alone = gradcam.explain(classifier.model, images, it.layer, method=it.method, target=target)
        torch.testing.assert_close(heatmaps, alone.heatmaps, rtol=0, atol=1e-5, msg=str(it))


class Forked(ColourNet):
    """With a dead end, and a grid that is too fine for some methods."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Upsample(scale_factor=8)
        self.dead = Turn()

    def forward(self, x: Tensor) -> Tensor:
        dead = self.dead(x - 10).relu()  # zero, whatever comes
        return super().forward(self.fine(x)) + dead.mean((1, 2, 3))[:, None]


def test_a_blind_layer_has_blank_maps_and_what_has_none_is_left_out() -> None:
    images = torch.stack([picture("red")])
    wanted = combine(["gradcam", "kpcacam"], ["logit"], ["turn", "fine", "dead"])
    trials = Trials(classifier_of(Forked()))
    found = dict(trials.explain(images, torch.tensor([[0, 1]]), wanted))
    too_fine = [Combination("kpcacam", None, layer) for layer in ("turn", "fine")]
    assert list(trials.left_out) == too_fine
    assert all("takes at most 1024" in reason for reason in trials.left_out.values())
    assert list(found) == [it for it in wanted if it not in too_fine]
    blank = found[Combination("gradcam", "logit", "dead")]
    assert blank.shape == (1, 2, 8, 8)
    assert blank.count_nonzero() == 0
    assert found[Combination("gradcam", "logit", "turn")][0, 0].max() == 1
    assert [it for it, _ in trials.explain(images, torch.tensor([[0, 1]]), wanted)] == list(found)


# Ranking


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_the_shortlist_is_what_is_not_clearly_worse_than_the_most() -> None:
    best, near, far, twin = (Combination("gradcam", "logit", layer) for layer in ("best", "near", "far", "twin"))
    mass = {
        far: values(0.5, 0.6, 0.5, 0.6, 0.5, 0.6),
        near: values(0.9, 0.7, 0.9, 0.7, 0.9, 0.75),
        best: values(0.8, 0.9, 0.8, 0.9, 0.8, 0.9),
        twin: values(0.80001, 0.9, 0.8, 0.9, 0.8, 0.9),
    }
    hits = {it: values(*[1.0] * 6) for it in mass}
    twins = find_twins(mass, hits)
    assert twins == {far: far, near: near, best: best, twin: best}
    assert find_most(mass) == twin
    assert not subtract(mass[near], mass[twin]).excludes(0)
    assert list_best(mass, twins, most=5) == [best, near]
    assert list_best(mass, twins, most=1) == [best]
    hits[twin] = values(0, 1, 1, 1, 1, 1)
    assert find_twins(mass, hits)[twin] == twin


def test_the_best_is_that_of_the_best_road_and_of_equal_ones_the_default() -> None:
    one, two, three = GRADCAM
    roads = {one: values(0.1, 0.3), two: values(0.2, 0.2), three: values(0.5, 0.5)}
    assert find_best(roads, [one, two], default=two) == two
    assert find_best(roads, [one, two], default=one) == one
    assert find_best(roads, [one, two, three], default=one) == three


def test_rows_have_the_numbers_in_their_order() -> None:
    one, two, three = GRADCAM
    four, five = (Combination("layercam", "logit", layer) for layer in ("turn", "active"))
    pairs = {one: (0.2, 0.4), two: (0.9, 0.7), three: (0.5, 0.5), four: (0.6, 0.6), five: (0.1, 0.1)}
    mass = {it: values(*pair * 3) for it, pair in pairs.items()}
    hits = {it: values(*(1, 0) * 3) for it in mass}
    roads = {five: values(*(0.0, 0.1) * 3), one: values(*(0.1, 0.3) * 3), two: values(*(0.0, 0.2) * 3)}
    rows = to_rows(mass, hits, roads, two)
    assert [row.combination for row in rows] == [two, one, five, four, three]
    rows = [rows[0], rows[1], rows[4]]
    assert [row.mass.mean for row in rows] == pytest.approx([0.8, 0.3, 0.5])
    assert [row.behind.mean for row in rows] == pytest.approx([0, -0.5, -0.3])
    assert [row.maximum.mean for row in rows] == [0.5] * 3
    assert rows[1].road is not None
    assert rows[1].road_behind is not None
    assert (rows[1].road.mean, rows[1].road_behind.mean) == pytest.approx((0.2, 0.1))
    assert -0.75 <= rows[1].behind.low < -0.5 < rows[1].behind.high <= -0.27
    assert rows[2].road is rows[2].road_behind is None
    assert [row.is_clearly_less for row in rows] == [False, True, True]


# The whole


@pytest.fixture(scope="module")
def found() -> Recommendation:
    return recommend(classifier_of(ColourNet()), PICTURES, methods=["gradcam", "eigencam"], mosaics=8)


def test_the_layer_that_knows_where_the_colours_are_is_recommended(found: Recommendation) -> None:
    assert found.best.combination.layer == "active"
    assert found.best.combination.method == "gradcam"
    assert (found.best.mass.mean, found.best.maximum.mean) == pytest.approx((1, 1), abs=1e-6)
    assert found.default is not None
    assert found.gain is not None
    assert found.default.combination == GRADCAM[0]
    assert (found.default.mass.mean, found.default.maximum.mean) == pytest.approx((0, 0), abs=1e-6)
    assert (found.gain.mean, found.gain.low) == pytest.approx((1, 1), abs=1e-6)
    assert found.default.road is not None
    assert not found.is_default
    assert found.default.is_clearly_less
    assert not found.best.is_clearly_less
    assert (found.mosaics, found.size, set(found.pictures)) == (8, (16, 16), set(COLOURS))


def test_every_combination_has_a_row(found: Recommendation) -> None:
    expected = combine(["gradcam", "eigencam"], ["logit", "probability", "contrast"], ["turn", "active"])
    assert {row.combination for row in found.rows} == set(expected)
    of_no_class = [row for row in found.rows if row.combination.method == "eigencam"]
    assert [row.mass.mean for row in of_no_class] == pytest.approx([0.25] * 2, abs=0.05)
    assert all(row.mass.n == 6 for row in found.rows)


def test_the_numbers_are_those_of_the_metrics_themselves(found: Recommendation) -> None:
    classifier = classifier_of(ColourNet())
    mosaics = arrange(classifier.model, find_tiles(classifier, PICTURES), limit=8)
    for it in (Combination("gradcam", "contrast", "active"), Combination("eigencam", None, "active")):
        numbers: dict[str, list[Tensor]] = {colour: [] for colour in COLOURS}
        for mosaic in mosaics:
            target = ClassTarget([list(mosaic.classes)], score=it.score or "logit")
            explained = gradcam.explain(classifier.model, mosaic.image[None], "active", method=it.method, target=target)
            game = grid_pointing_game(explained)
            for name, *pair in zip(mosaic.names, game.mass[0], game.hits[0], strict=True):
                numbers[name].append(torch.stack(pair).double())
        means = torch.stack([torch.stack(each).mean(0) for each in numbers.values()])
        (row,) = (row for row in found.rows if row.combination == it)
        for interval, expected in ((row.mass, means[:, 0]), (row.maximum, means[:, 1])):
            assert vars(interval) == pytest.approx(vars(mean_interval(expected.tolist())))
    images = torch.stack(list(PICTURES.values()))
    subject = Subject(classifier.model, images)
    explained = gradcam.explain(classifier.model, images, "turn", target=list(range(6)))
    scores = [road(Subject(classifier.model, images[part]), explained.heatmaps[part, 0], shares=SHARES) for part in
              (slice(0, 4), slice(4, 6))]  # fmt: skip
    assert subject.classes.tolist() == list(range(6))
    assert found.default is not None
    assert found.default.road is not None
    combined = torch.cat([each.combined for each in scores]).mean()
    assert found.default.road.mean == pytest.approx(float(combined), abs=1e-6)


def test_mass_and_maxima_are_told_apart() -> None:
    classifier = classifier_of(ColourNet())
    tiles = find_tiles(classifier, {colour: PICTURES[colour] for colour in COLOURS[:4]})
    (mosaic,) = arrange(classifier.model, tiles)
    it = Combination("eigencam", None, "colour")
    (mass, hits) = Contest(Trials(classifier), tiles, [mosaic], 0).play([it])
    target = [list(mosaic.classes)]
    explained = gradcam.explain(classifier.model, mosaic.image[None], "colour", method="eigencam", target=target)
    game = grid_pointing_game(explained)
    order = [mosaic.names.index(tile.name) for tile in tiles]
    torch.testing.assert_close(mass[it], game.mass[0, order].double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(hits[it], game.hits[0, order].double(), rtol=0, atol=1e-6)
    assert (mass[it] - hits[it]).abs().max() > 0.01


def test_road_is_measured_with_the_seed() -> None:
    classifier = classifier_of(ColourNet())
    pale = {colour: picture(colour, strength=0.5) for colour in COLOURS[:4]}
    tiles = find_tiles(classifier, pale, least=0)
    found = Contest(Trials(classifier), tiles, (), 7).remove([GRADCAM[1]])[GRADCAM[1]]
    images = torch.stack([tile.image for tile in tiles])
    subject = Subject(classifier.model, images)
    heatmaps = gradcam.explain(classifier.model, images, "active", target=subject.classes).heatmaps[:, 0]
    seven, eight = (road(subject, heatmaps, shares=SHARES, seed=seed).combined.double() for seed in (7, 8))
    torch.testing.assert_close(found, seven, rtol=0, atol=1e-7)
    assert (found - eight).abs().max() > 1e-5


def test_gains_are_the_best_minus_the_default() -> None:
    pale = {colour: picture(colour, strength=0.5) for colour in COLOURS}
    for image in pale.values():
        image[:, 4:] *= 0.5  # one half says more than the other
    options: Any = {"methods": ["gradcam"], "scores": ["logit"], "layers": ["active"]}
    result = recommend(classifier_of(ColourNet()), pale, **options, least=0)
    assert result.default is not None
    assert None not in (result.best.road, result.default.road, result.default.road_behind, result.road_gain)
    assert result.best.road.mean > result.default.road.mean + 0.01
    assert result.road_gain.mean == pytest.approx(result.best.road.mean - result.default.road.mean)
    assert result.default.road_behind.mean == pytest.approx(-result.road_gain.mean)


def test_the_same_seed_gives_the_same_to_the_last_digit(found: Recommendation) -> None:
    torch.manual_seed(99)
    again = recommend(classifier_of(ColourNet()), PICTURES, methods=["gradcam", "eigencam"], mosaics=8)
    assert json.dumps(again.to_dict()) == json.dumps(found.to_dict())
    other = recommend(classifier_of(ColourNet()), PICTURES, methods=["gradcam", "eigencam"], mosaics=8, seed=1)
    assert json.dumps(other.to_dict()) != json.dumps(found.to_dict())


def test_the_default_is_recommended_where_nothing_is_better() -> None:
    result = recommend(classifier_of(ColourNet(), "active"), PICTURES, methods=["hirescam"], scores=["logit"])
    assert result.is_default
    assert result.gain is not None
    assert (result.gain.mean, result.gain.low, result.gain.high) == (0, 0, 0)
    assert result.rows[0].combination == Combination("gradcam", "logit", "active")


def test_the_progress_ends_with_all_steps() -> None:
    told: list[tuple[int, int]] = []
    recommend(
        classifier_of(ColourNet()),
        PICTURES,
        methods=["gradcam"],
        scores=["logit"],
        layers=["turn", "active"],
        mosaics=3,
        progress=lambda done, total: told.append((done, total)),
    )
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert told[-1] == (3 + 2 * 2, 3 + 2 * 2)  # mosaics, and two combinations with two batches of ROAD each


def test_a_default_without_a_map_is_said_and_the_rest_goes_on() -> None:
    model = Forked()
    result = recommend(classifier_of(model, "dead"), PICTURES, methods=["gradcam"], layers=["active"], mosaics=2)
    assert result.best.combination.layer == "active"
    assert result.default is not None
    assert result.default.mass.mean == 0
    with pytest.raises(LayerError, match="head"):
        recommend(classifier_of(model, "head"), PICTURES, methods=["gradcam"], layers=["head"], mosaics=2)
    without = recommend(classifier_of(model, "head"), PICTURES, methods=["gradcam"], layers=["active"], mosaics=2)
    assert without.default is without.gain is without.road_gain is None
    assert not without.is_default
    assert [it.layer for it in without.left_out] == ["head"]
    assert without.to_dict()["left_out"][0]["method"] == "gradcam"


def test_too_few_classes_and_layers_that_are_not_there_are_errors() -> None:
    classifier = classifier_of(ColourNet())
    with pytest.raises(InputError, match="sure of 2 classes"):
        recommend(classifier, {colour: PICTURES[colour] for colour in ("red", "blue")})
    with pytest.raises(LayerError, match="no layer 'activ'"):
        recommend(classifier, PICTURES, layers=["activ"])
    with pytest.raises(GradcamError, match="mosaics"):
        recommend(classifier, PICTURES, mosaics=0)


@pytest.mark.slow
def test_the_embedded_model_points_at_pictures_it_was_not_tuned_on(classifier: gradcam.Classifier, photo: Any) -> None:
    """The half that `scripts/choose_defaults` measures on, of what is in assets, and the layer that it chooses."""
    names = ["camera.png", "chelsea.jpg", "lemur.webp", "macaw.webp", "polar_bear.webp"]
    tiles = find_tiles(classifier, {name: photo(name) for name in names}, least=0.25)
    contest = Contest(Trials(classifier), tiles, arrange(classifier.model, tiles), 0)
    raw, best = (Combination("gradcam", "logit", layer) for layer in ("layer4", "head.0.1"))
    mass, hits = contest.play([raw, best])
    assert len(contest.mosaics) == 5
    assert mass[raw].mean() >= 0.80
    assert mass[best].mean() >= 0.90
    assert min(hits[raw].mean(), hits[best].mean()) >= 0.97
