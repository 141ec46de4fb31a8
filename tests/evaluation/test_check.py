"""The verdict on one explanation: its four tests, their thresholds, what it says and what it shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from captum.attr import LayerGradCam
from torch import Tensor, nn

import gradcam
from gradcam.batch.save import describe_weights
from gradcam.cam.postprocess import resize
from gradcam.errors import GradcamError, ImageError, TargetError
from gradcam.evaluation import Explainer, Subject, check
from gradcam.evaluation.checks import verdict as verdicts
from gradcam.evaluation.checks.check import NOISE, OTHERS, SAMPLES, STAGES, occlude
from gradcam.evaluation.checks.verdict import (
    COLOURS,
    COLUMNS,
    QUESTIONS,
    Thresholds,
    Verdict,
    _wrap,
    read_calibration,
    read_thresholds,
    set_thresholds,
)
from gradcam.evaluation.explainers import make_random
from gradcam.evaluation.metrics.soundness import find_rivals, max_sensitivity, randomisation, rank_correlation
from gradcam.images.draw import overlay, scale
from gradcam.images.sheets import MARGIN, measure_text
from tests.helpers import assert_same, tiny_model, traces

Photo = Callable[[str], Path]
# The calibration holds the others; china and flower are not in it.
AGAIN = ("koala.webp", "rocket.jpg", "cat_and_espresso.jpg", "china.jpg", "flower.jpg")


@pytest.fixture(scope="module")
def tiny() -> gradcam.Classifier:
    """A small model of the caller's, for which nothing is calibrated."""
    return gradcam.load_classifier(tiny_model(), size=(24, 32), layer="3")


@pytest.fixture(scope="module")
def picture() -> np.ndarray:
    """Something to look at, with 24 x 32 pixels."""
    return np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def koala(classifier: gradcam.Classifier, photo: Photo) -> Verdict:
    return check(classifier, photo("koala.webp"))


def outcomes(verdict: Verdict) -> dict[str, str]:
    return {test.name: test.outcome for test in verdict.tests}


# Thresholds


@pytest.mark.parametrize(
    ("value", "lower", "higher"),
    [
        (0.0, "passed", "failed"),
        (0.4, "passed", "failed"),
        (0.41, "doubtful", "doubtful"),
        (0.69, "doubtful", "doubtful"),
        (0.7, "failed", "passed"),
        (1.0, "failed", "passed"),
        (float("nan"), "failed", "failed"),
    ],
)
def test_values_are_judged_in_either_direction(value: float, lower: str, higher: str) -> None:
    assert Thresholds(passes=0.4, fails=0.7).judge(value) == lower
    assert Thresholds(passes=0.7, fails=0.4).judge(value) == higher


def test_thresholds_say_their_direction_and_lie_at_the_thirds_of_the_gap() -> None:
    assert str(Thresholds(0.4, 0.7)) == "passes up to 0.40, fails from 0.70"
    assert str(Thresholds(0.9, 0.5)) == "passes from 0.90, fails up to 0.50"
    assert set_thresholds([0.1, 0.4, -0.2], [1.0, 1.2]) == Thresholds(0.6, 0.8)
    with pytest.raises(GradcamError, match=r"have up to 1.3, those that do not from 1: no gap"):
        set_thresholds([0.1, 1.3], [1.0])


def test_the_recorded_thresholds_follow_from_the_recorded_values() -> None:
    found = read_calibration()
    values = found["values"]

    def of(test: str, *names: str) -> list[float]:
        return [each[test] for name in names for each in values[name].values()]

    fixed = ("random", "centre", "edges", "constant")
    passes, fails = np.quantile(found["noise"], [0.8, 0.5])
    assert read_thresholds() == {
        "randomisation": set_thresholds(of("randomisation", "gradcam"), of("randomisation", *fixed)),
        "classes": set_thresholds(of("classes", "gradcam"), of("classes", *fixed)),
        "covering": Thresholds(round(float(passes), 2), round(float(fails), 2)),
        "stability": set_thresholds(of("stability", "gradcam"), of("stability", "anew")),
    }


def test_in_the_calibration_gradcam_passes_and_what_knows_nothing_fails() -> None:
    thresholds, values = read_thresholds(), read_calibration()["values"]

    def worst(found: dict[str, float]) -> str:
        judged = [thresholds[test].judge(value) for test, value in found.items()]
        return max(judged, key=verdicts.OUTCOMES.index)

    assert {it: worst(found) for it, found in values["gradcam"].items()} == dict.fromkeys(values["gradcam"], "passed")
    for name in ("random", "centre", "edges", "constant", "anew"):
        assert {worst(found) for found in values[name].values()} == {"failed"}, name


def test_the_calibration_is_of_the_embedded_weights(classifier: gradcam.Classifier) -> None:
    found = read_calibration()
    assert (found["model"], found["layer"]) == (classifier.name, classifier.layer)
    assert found["weights"] == describe_weights(classifier)["sha256"]


# The verdict


def test_gradcam_on_the_koala_passes(koala: Verdict) -> None:
    assert koala.outcome == "passed"
    assert outcomes(koala) == dict.fromkeys(QUESTIONS, "passed")
    assert koala.calibrated
    assert (koala.method, koala.layer, koala.score) == ("gradcam", "layer4", "logit")
    assert (koala.index, koala.label) == (105, "koala")
    assert koala.caution == "The thresholds were calibrated on this model, with gradcam at layer4."


def test_the_numbers_are_those_of_the_functions(koala: Verdict, classifier: gradcam.Classifier, photo: Photo) -> None:
    images = classifier.batch([gradcam.read_image(photo("koala.webp"))])
    subject = Subject(classifier.model, images)
    explain = Explainer(("gradcam",), "layer4").only("gradcam")
    heatmap = explain(classifier.model, images, subject.classes)
    assert torch.equal(koala.exhibits.heatmap, heatmap[0])
    assert torch.equal(heatmap, classifier.explain(photo("koala.webp")).heatmaps[:, 0])
    found = {test.name: test.value for test in koala.tests}
    stages = randomisation(subject, explain, heatmap, stages=STAGES)
    assert found["randomisation"] == pytest.approx(float(stages.correlations.mean()), abs=1e-6)
    assert found["covering"] == float(occlude(subject, heatmap).rates)
    radius = NOISE * float(images.max() - images.min())
    largest = float(max_sensitivity(subject, explain, heatmap, radius=radius))
    assert found["stability"] == pytest.approx(largest, abs=1e-6)
    likeness = [
        float(rank_correlation(heatmap, explain(classifier.model, images, torch.tensor([index]))))
        for index in koala.exhibits.rivals
    ]
    assert found["classes"] == pytest.approx(sum(likeness[1:]) / OTHERS, abs=1e-6)
    assert koala.exhibits.likeness.tolist() == pytest.approx(likeness, abs=1e-6)


def test_others_are_the_rival_and_some_by_chance(koala: Verdict, classifier: gradcam.Classifier, photo: Photo) -> None:
    rivals = koala.exhibits.rivals
    images = classifier.batch([gradcam.read_image(photo("koala.webp"))])
    assert rivals[0] == int(find_rivals(Subject(classifier.model, images)))
    assert len(set(rivals)) == 1 + OTHERS
    assert 105 not in rivals


def test_reasons_say_the_numbers(koala: Verdict) -> None:
    reasons = {test.name: test.reason for test in koala.tests}
    values = {test.name: test.value for test in koala.tests}
    assert f"from head.3 down to stem.0.0, in {STAGES} stages" in reasons["randomisation"]
    assert f"is {values['randomisation']:.2f} on average" in reasons["randomisation"]
    assert f"{OTHERS} classes drawn by chance is {values['classes']:.2f} on average" in reasons["classes"]
    assert "strongest rival, indri, which the model may rightly look for in the same place" in reasons["classes"]
    assert f"lower than at {values['covering']:.0%} of 20 other places" in reasons["covering"]
    assert f"changes by {values['stability']:.0%} of its own length at most" in reasons["stability"]


@pytest.mark.parametrize("control", ["random", "centre", "edges", "constant"])
def test_maps_that_know_nothing_of_the_model_fail(control: str, classifier: gradcam.Classifier, photo: Photo) -> None:
    found = check(classifier, photo("koala.webp"), method=control)
    assert found.outcome == "failed"
    assert outcomes(found)["randomisation"] == outcomes(found)["classes"] == "failed"
    assert found.layer is None
    assert "tells nothing of what the model has learnt" in found.tests[0].reason
    assert "It is the same for 11 other classes" in found.tests[1].reason


def anew(seed: int) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    calls = iter(range(seed, seed + 1000))
    return lambda model, images, classes: make_random(images, next(calls))


def test_noise_that_is_drawn_anew_for_each_call_fails(classifier: gradcam.Classifier, photo: Photo) -> None:
    found = check(classifier, photo("koala.webp"), method=anew(7))
    assert found.outcome == "failed"
    assert outcomes(found)["stability"] == "failed"
    assert outcomes(found)["randomisation"] == outcomes(found)["classes"] == "passed"  # which it is not refuted by


@pytest.mark.slow
@pytest.mark.parametrize("name", AGAIN)
def test_gradcam_passes_on_the_sample_pictures(name: str, classifier: gradcam.Classifier, photo: Photo) -> None:
    assert outcomes(check(classifier, photo(name))) == dict.fromkeys(QUESTIONS, "passed")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_gradcam_passes_and_noise_fails_with_any_seed(seed: int, classifier: gradcam.Classifier, photo: Photo) -> None:
    lemur = photo("lemur.webp")
    assert check(classifier, lemur, seed=seed).outcome == "passed"
    assert check(classifier, lemur, method="random", seed=seed).outcome == "failed"
    assert check(classifier, lemur, method=anew(seed), seed=seed).outcome == "failed"


def test_a_constant_map_marks_nothing(classifier: gradcam.Classifier, photo: Photo) -> None:
    found = check(classifier, photo("koala.webp"), method=lambda model, images, classes: torch.zeros(1, 224, 224))
    assert outcomes(found)["covering"] == "failed"
    assert found.tests[2].reason == "The map is the same everywhere: it marks nothing that could be covered."
    assert found.tests[3].value == 0


def test_maps_of_another_library(tiny: gradcam.Classifier, picture: np.ndarray) -> None:
    def captum_gradcam(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        maps = LayerGradCam(model, model[3]).attribute(images.requires_grad_(), classes, relu_attributions=True)
        return resize(maps, images.shape[2:])[:, 0]  # as ours are: ranks near zero depend on it

    theirs, ours = check(tiny, picture, method=captum_gradcam), check(tiny, picture, method="gradcam")
    assert theirs.method == "captum_gradcam"
    assert theirs.layer is None
    for one, other in zip(theirs.tests, ours.tests):
        assert one.value == pytest.approx(other.value, abs=0.02), one.name


def test_the_seed_decides_what_is_drawn(tiny: gradcam.Classifier, picture: np.ndarray) -> None:
    one, same, other = (check(tiny, picture, seed=seed).to_record()["tests"] for seed in (3, 3, 4))
    assert one == same
    assert one[0]["value"] != other[0]["value"]
    assert one[3]["value"] != other[3]["value"]


def test_nothing_is_left_on_the_model(tiny: gradcam.Classifier, picture: np.ndarray) -> None:
    tiny.model.train()
    before = traces(tiny.model)
    check(tiny, picture)
    assert_same(before, traces(tiny.model))
    tiny.model.eval()


def test_other_weights_and_names_are_not_calibrated(
    tiny: gradcam.Classifier, picture: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check(tiny, picture)
    assert not found.calibrated
    assert "uncalibrated for this model: they were measured on efficientnet_lite0" in found.caution
    known = {**read_calibration(), "model": tiny.name, "weights": describe_weights(tiny)["sha256"]}
    monkeypatch.setattr(verdicts, "read_calibration", lambda: known)
    assert check(tiny, picture).calibrated
    assert not check(replace(tiny, name="resnet50"), picture).calibrated
    other = tiny_model()
    nn.init.ones_(other[0].weight)
    assert not check(replace(tiny, model=other), picture).calibrated


def test_a_class_a_layer_and_a_score_can_be_named(tiny: gradcam.Classifier, picture: np.ndarray) -> None:
    found = check(tiny, picture, target=2, layer="1", score="contrast", method="HiResCAM")
    assert (found.index, found.layer, found.score, found.method) == (2, "1", "contrast", "hirescam")
    target = gradcam.targets.ClassTarget(2, score="contrast")
    expected = tiny.explain(picture, "1", method="hirescam", target=target).heatmaps[0, 0]
    assert torch.equal(found.exhibits.heatmap, expected)
    assert found.probability == pytest.approx(float(tiny.explain(picture).probabilities()[0, 2]), abs=1e-6)
    assert 2 not in found.exhibits.rivals
    assert sorted(found.exhibits.rivals) == [0, 1, 3, 4]  # there are no more


def test_a_class_by_its_label(classifier: gradcam.Classifier, photo: Photo) -> None:
    found = check(classifier, photo("koala.webp"), target="wombat", method="constant")
    assert (found.index, found.label, found.class_name) == (106, "wombat", "wombat (106)")


def test_two_classes_are_compared_with_one_another(picture: np.ndarray) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1))
    torch.manual_seed(3)
    nn.init.normal_(model[4].weight)
    found = check(gradcam.load_classifier(model, size=(24, 32), layer="1"), picture, method="edges")
    assert found.exhibits.rivals == (1 - found.index,)
    assert found.tests[1].value == 1
    assert found.tests[1].reason == "It is the same for 1 other class: no class is in it."


def test_progress_goes_from_the_first_pass_to_the_last(tiny: gradcam.Classifier, picture: np.ndarray) -> None:
    told: list[tuple[int, int]] = []
    check(tiny, picture, progress=lambda done, total: told.append((done, total)))
    done = [one for one, _ in told]
    assert done == sorted(done)
    assert done[0] == 1
    assert told[-1][0] == told[-1][1]
    assert len({total for _, total in told}) == 1


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"method": "gradcm"}, GradcamError, "There is no method or control 'gradcm'. Nearest: 'gradcam'"),
        ({"score": "loss"}, TargetError, "There is no score 'loss'"),
        ({"seed": 1.5}, GradcamError, "seed is 1.5, expected an int"),
        ({"seed": True}, GradcamError, "seed is True"),
        ({"target": [[0, 1]]}, TargetError, "There are 2 classes of each image, expected one"),
        ({"target": 5}, TargetError, "Class 5 does not exist"),
        ({"layer": "9"}, GradcamError, "There is no layer '9'"),
        ({"method": lambda *_: torch.zeros(1, 4, 4)}, ImageError, r"the shape \(1, 4, 4\), and the images"),
    ],
)
def test_what_cannot_be_checked(
    options: dict[str, object], kind: type[Exception], message: str, tiny: gradcam.Classifier, picture: np.ndarray
) -> None:
    with pytest.raises(kind, match=message):
        check(tiny, picture, **options)  # type: ignore[arg-type]


def test_the_worst_test_decides(koala: Verdict) -> None:
    first, *others = koala.tests
    assert replace(koala, tests=(replace(first, outcome="doubtful"), *others)).outcome == "doubtful"
    both = (replace(first, outcome="failed"), replace(others[0], outcome="doubtful"), *others[1:])
    assert replace(koala, tests=both).outcome == "failed"


def test_the_record_is_json(koala: Verdict) -> None:
    record = json.loads(json.dumps(koala.to_record(), allow_nan=False))
    assert record["outcome"] == "passed"
    assert record["calibrated"] is True
    assert [test["name"] for test in record["tests"]] == list(QUESTIONS)
    assert record["tests"][2] == {
        "name": "covering",
        "outcome": "passed",
        "value": koala.tests[2].value,
        "passes": koala.tests[2].thresholds.passes,
        "fails": koala.tests[2].thresholds.fails,
        "reason": koala.tests[2].reason,
    }


# The panel


def find(panel: np.ndarray, cell: np.ndarray) -> list[tuple[int, int]]:
    height, width = cell.shape[:2]
    corner = (panel[: 1 - height or None, : 1 - width or None] == cell[0, 0]).all(2)
    return [
        (int(top), int(left))
        for top, left in zip(*np.nonzero(corner))
        if np.array_equal(panel[top : top + height, left : left + width], cell)
    ]


def test_the_panel_shows_the_map_and_what_became_of_it(koala: Verdict) -> None:
    panel = koala.panel(height=120)
    picture = scale(koala.picture, 120)
    own = find(panel, overlay(picture, koala.exhibits.heatmap))
    assert [left for _, left in own] == [MARGIN] * 3
    tops = [top for top, _ in own]
    randomised = overlay(picture, koala.exhibits.randomisation.heatmaps[0, -1])
    ((top, left),) = find(panel, randomised)
    assert top == tops[0]
    assert left > MARGIN + 4 * 120
    ((top, left),) = find(panel, overlay(picture, koala.exhibits.rival_maps[0]))
    assert top == tops[1]
    sensitivity = (koala.exhibits.noisy_maps - koala.exhibits.heatmap).flatten(1).norm(dim=1)
    worst = overlay(picture, koala.exhibits.noisy_maps[sensitivity.argmax()])
    assert find(panel, worst)[0][0] == tops[2]
    assert len(koala.exhibits.noisy_maps) == SAMPLES


def test_the_panel_shows_what_was_covered(koala: Verdict) -> None:
    panel = koala.panel(height=224)
    picture = scale(koala.picture, 224)
    mean = picture.mean((0, 1)).round()
    order = koala.exhibits.heatmap.flatten().argsort(descending=True)
    covered = picture.reshape(-1, 3).copy()
    covered[order[: round(0.3 * 224 * 224)].numpy()] = mean
    ((_, left),) = find(panel, covered.reshape(224, 224, 3))
    assert left == MARGIN


@pytest.mark.parametrize("outcome", ["passed", "doubtful", "failed"])
def test_the_panel_writes_each_outcome_in_its_colour(outcome: str, koala: Verdict) -> None:
    tests = tuple(replace(test, outcome=outcome) for test in koala.tests)  # type: ignore[arg-type]
    panel = replace(koala, tests=tests).panel(height=20)
    written = {name: int((panel == colour).all(2).sum()) for name, colour in COLOURS.items()}
    assert written[outcome] > 100
    assert sum(written.values()) == written[outcome]


def test_long_names_stay_on_the_panel(koala: Verdict) -> None:
    labels = ["a very long name of a class, " * 20] * 1000
    panel = replace(koala, labels=labels, label=labels[0], method="m" * 300).panel(height=40)
    assert panel.shape[1] == koala.panel(height=40).shape[1]
    assert (panel[:, -MARGIN // 2 :] == 255).all()


def test_lines_hold_as_many_words_as_fit() -> None:
    text = "one two three four five six seven"
    lines = _wrap(text, measure_text("one two three", 14) + 1, 14)
    assert " ".join(lines) == text
    assert lines[0] == "one two three"
    assert _wrap("unbreakable", 5, 14) == ["unbreakable"]


@pytest.mark.parametrize("height", [0, 2.5, True, "a"])
def test_a_height_that_cannot_be(height: object, koala: Verdict) -> None:
    with pytest.raises(ImageError, match="expected the height of each picture in pixels"):
        koala.panel(height=height)  # type: ignore[arg-type]


def test_a_panel_of_a_wide_picture_is_as_wide_as_it_needs(tiny: gradcam.Classifier, picture: np.ndarray) -> None:
    panel = check(tiny, picture).panel(height=150)
    assert panel.shape[1] == 2 * MARGIN + COLUMNS * 200 + (COLUMNS - 1) * 8
