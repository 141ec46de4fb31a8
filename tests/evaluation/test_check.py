"""Test the verdict on one explanation: its outcomes, its messages and its panel."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from captum.attr import LayerGradCam
from torch import Tensor, nn

import gradcam
from gradcam.cam.postprocess import resize
from gradcam.errors import GradcamError, ImageError, TargetError
from gradcam.evaluation import Explainer, Subject, check, uncertainty
from gradcam.evaluation.checks.control_maps import ANOTHER_WORD, CONTROL_DESCRIPTIONS, RIVAL, RIVALS
from gradcam.evaluation.checks.findings import QUESTIONS
from gradcam.evaluation.checks.verdict import Verdict
from gradcam.evaluation.explainers import make_random
from gradcam.evaluation.metrics.soundness import find_rivals, randomisation, rank_correlation
from gradcam.images.draw import overlay, scale_to_height
from gradcam.images.sheets import MARGIN
from tests import colour_model
from tests.drawn.pictures import ShapeSpec, draw_scene
from tests.helpers import assert_same, tiny_model, traces

Photo = Callable[[str], Path]
GREEN = 1


@pytest.fixture(scope="module")
def colours() -> gradcam.Classifier:
    """Return a network that has its evidence of a colour where the colour is."""
    return colour_model.load()


@pytest.fixture(scope="module")
def green(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return colour_model.paint(tmp_path_factory.mktemp("colours") / "green.png", GREEN, seed=1)


@pytest.fixture(scope="module")
def koala(classifier: gradcam.Classifier, photo: Photo) -> Verdict:
    return check(classifier, photo("koala.webp"))


def outcomes(verdict: Verdict) -> dict[str, str]:
    return {test.name: test.outcome for test in verdict.tests}


def gradcam_of(classifier: gradcam.Classifier) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    return Explainer(("gradcam",), classifier.layer).only("gradcam")


# Explanations that pass, and the messages of the verdict


def test_gradcam_on_the_koala_passes(koala: Verdict) -> None:
    assert koala.outcome == "passed"
    assert outcomes(koala) == dict.fromkeys(QUESTIONS, "passed")
    assert (koala.class_name, koala.method, koala.layer) == ("koala (105)", "gradcam", "layer4")
    assert set(CONTROL_DESCRIPTIONS) - set(RIVALS) <= set(koala.distinguished_from)
    assert [sham.name for sham in koala.controls] == [name for name in CONTROL_DESCRIPTIONS if name != ANOTHER_WORD]
    assert not any(sham.is_better for sham in koala.controls)


def test_the_numbers_are_those_of_the_functions(koala: Verdict, classifier: gradcam.Classifier, photo: Photo) -> None:
    values = {test.name: test.value for test in koala.tests}
    subject = Subject(classifier.model, classifier.batch([photo("koala.webp")]))
    explain, artifacts = gradcam_of(classifier), koala.artifacts
    explanation = explain(subject.model, subject.images, subject.classes)
    assert torch.equal(explanation[0], artifacts.heatmap)
    randomised = randomisation(subject, explain, explanation, stages=3, seed=0)
    assert values["randomisation"] == pytest.approx(float(randomised.correlations.mean()), abs=1e-5)
    assert artifacts.rivals[0] == int(find_rivals(subject))
    rival_maps = [explain(subject.model, subject.images, torch.tensor([index])) for index in artifacts.rivals]
    similarities = torch.cat([rank_correlation(explanation, heatmap) for heatmap in rival_maps])
    assert values["classes"] == pytest.approx(float(similarities[1:].mean()), abs=1e-5)
    noisy = rank_correlation(explanation.expand(4, -1, -1), artifacts.noisy_maps)
    assert values["stability"] == pytest.approx(float(noisy.mean()), abs=1e-5)
    rival = next(control for control in koala.controls if control.name == RIVAL)
    assert koala.rival == f"{classifier.label(artifacts.rivals[0])} ({float(similarities[0]):.2f})"
    assert f"The most probable alternative has the same heatmap: {koala.rival}." in koala.summary
    assert rival.alike > 0.5


def test_the_map_is_tried_in_mosaics_of_pictures_that_show_the_class_least(
    koala: Verdict, classifier: gradcam.Classifier
) -> None:
    ground, placed = koala.artifacts.grid, koala.artifacts.placed_maps
    explain = gradcam_of(classifier)
    for image, heatmap in zip(ground.images, placed):
        torch.testing.assert_close(explain(classifier.model, image[None], torch.tensor([105]))[0], heatmap)
    value = next(test.value for test in koala.tests if test.name == "placement")
    ranks = placed.flatten(1).argsort(1).argsort(1)  # the maps have almost no ties
    pixels, cell = placed[0].numel(), placed[0].numel() // 4
    mean_ranks = [float(ranks[i][ground.cells[i].flatten()].double().mean()) for i in range(4)]
    expected = sum((mean - (cell - 1) / 2) / (pixels - cell) for mean in mean_ranks) / 4
    assert value == pytest.approx(expected, abs=0.02)


def test_a_method_may_look_at_another_layer_and_library(colours: gradcam.Classifier, green: Path) -> None:
    def captum_gradcam(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        maps = LayerGradCam(model, model.relu).attribute(images.requires_grad_(), classes, relu_attributions=True)
        # Resize like gradcam does, because the ranks near zero depend on the interpolation.
        return resize(maps, images.shape[2:])[:, 0]

    theirs, ours = check(colours, green, method=captum_gradcam), check(colours, green, method="gradcam")
    assert theirs.method == "captum_gradcam"
    assert theirs.layer is None
    for their_test, our_test in zip(theirs.tests, ours.tests, strict=True):
        assert their_test.value == pytest.approx(our_test.value, abs=0.05), their_test.name
        assert their_test.outcome == our_test.outcome
    assert ours.outcome == "passed"


# Explanations that do not pass


@pytest.mark.parametrize(
    ("control", "failed_test"),
    [("random", "classes"), ("centre", "classes"), ("edges", "classes"), ("constant", "covering")],
)
def test_control_maps_fail(control: str, failed_test: str, classifier: gradcam.Classifier, photo: Photo) -> None:
    report = check(classifier, photo("koala.webp"), method=control)
    assert report.outcome == "failed"
    assert outcomes(report)[failed_test] == "failed"
    assert report.tests[-1].name == failed_test  # no test runs after one has failed
    assert report.distinguished_from == []


def shifted(explain: Any) -> Any:
    return lambda model, images, classes: explain(model, images, classes).roll((10, 11), (1, 2))


def noise_by_weights_and_class(_: Any) -> Any:
    def explain(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double()
        key = float((flat * torch.arange(len(flat))).sum())
        return make_random(images, hash((round(key, 6), int(classes[0]))) % 2**31)

    return explain


def noise_anew(_: Any) -> Any:
    seeds = iter(range(10**6))
    return lambda model, images, classes: make_random(images, next(seeds))


def of_another_picture(explain: Any) -> Any:
    fixed_image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    fixed_image[:, 1, :16, :16], fixed_image[:, ::2, :16, :16] = 1, 0  # green in the top left quarter

    def explain_fixed_image(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        return nn.functional.interpolate(explain(model, fixed_image, classes)[None], images.shape[2:])[0]

    return explain_fixed_image


def of_weights_of_its_own(explain: Any) -> Any:
    model_copy = colour_model.make()
    return lambda model, images, classes: explain(model_copy, images, classes)


BROKEN_EXPLAINERS = {
    "mirrored": (lambda explain: lambda *inputs: explain(*inputs).flip(2), "placement"),
    "shifted": (shifted, "placement"),
    "noise by weights and class": (noise_by_weights_and_class, "placement"),
    "noise anew": (noise_anew, "stability"),
    "another picture's": (of_another_picture, "placement"),
    "of weights of its own": (of_weights_of_its_own, "randomisation"),
    "of no class": (lambda explain: lambda model, images, _: explain(model, images, torch.tensor([GREEN])), "classes"),
}


@pytest.mark.parametrize("name", BROKEN_EXPLAINERS)
def test_functions_with_one_thing_wrong_fail(name: str, colours: gradcam.Classifier, green: Path) -> None:
    make, decided = BROKEN_EXPLAINERS[name]
    report = check(colours, green, method=make(gradcam_of(colours)))
    assert report.outcome == "failed"
    assert outcomes(report)[decided] == "failed"


def test_a_rivals_map_does_not_pass_where_the_rival_is_elsewhere(classifier: gradcam.Classifier, photo: Photo) -> None:
    explain = gradcam_of(classifier)

    def espresso(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        return explain(model, images, torch.where(classes == 285, 967, classes))

    report = check(classifier, photo("cat_and_espresso.jpg"), target=285, method=espresso)
    assert report.outcome != "passed"


@pytest.mark.parametrize("method", ["gradcam", "gradcam++", "layercam"])
def test_a_network_with_random_weights_has_too_little_to_explain(method: str) -> None:
    torch.manual_seed(0)
    classifier = gradcam.load_classifier(torchvision.models.resnet18(weights=None), size=64)
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    report = check(classifier, picture, method=method)
    assert report.outcome == report.tests[-1].outcome == "undecided"
    assert "there is too little evidence to explain" in report.tests[-1].reason


@pytest.mark.parametrize("seed", [0, 11])
def test_confident_random_networks_do_not_distinguish_images(seed: int) -> None:
    """The network of seed 11 would pass the other tests, because its class does depend on where this image is dark."""
    torch.manual_seed(seed)
    stem = [nn.Conv2d(3, 16, 5, 4), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.BatchNorm2d(32)]
    model = nn.Sequential(*stem, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)).eval()
    with torch.no_grad():
        model[-1].weight.mul_(20)
    classifier = gradcam.load_classifier(model, size=(96, 96), layer="5")
    rngs = [np.random.default_rng([8, number]) for number in range(12)]
    images = [draw_scene(rng, things=[ShapeSpec(colour=i % 4)]).picture for i, rng in enumerate(rngs)]
    picture, other_images = images[seed], images[1:6]
    report = check(classifier, picture, method="layercam", other_images=other_images)
    assert report.outcome == "undecided"
    match = re.search(r"is (-?\d+\.\d+) higher", report.tests[-1].reason)
    with torch.no_grad():
        probabilities = model(classifier.batch([picture, *other_images])).softmax(1)[:, report.index]
    expected = float(probabilities[0]) - sum(sorted(probabilities[1:].tolist())[:3]) / 3
    assert float(match[1]) == pytest.approx(expected, abs=0.006)


def test_what_no_covering_changes_is_too_little(colours: gradcam.Classifier) -> None:
    class Always(colour_model.ColourNet):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) / 60 + torch.tensor([0, 9.0, 0, 0, 0])

    report = check(replace(colours, model=Always().eval()), np.zeros((32, 32, 3), np.uint8), target=GREEN)
    assert report.outcome != "passed"
    assert report.probability > 0.99
    blank = check(replace(colours, model=Always().eval()), np.full((32, 32, 3), (0, 255, 0), np.uint8))
    assert blank.outcome in ("undecided", "failed")


def test_a_model_that_cannot_be_copied_is_asked_the_rest(colours: gradcam.Classifier, green: Path) -> None:
    class Uncopied(colour_model.ColourNet):
        def __deepcopy__(self, memo: object) -> nn.Module:
            raise TypeError("not this one")

    report = check(replace(colours, model=Uncopied().eval()), green)
    assert outcomes(report)["randomisation"] == "undecided"
    assert outcomes(report)["placement"] == "passed"
    assert any("of a network with random weights: Uncopied cannot be copied" in note for note in report.notes)
    assert report.outcome == "undecided"


def test_a_picture_too_small_for_a_mosaic_is_tried_by_itself() -> None:
    classifier = colour_model.load()
    classifier = replace(classifier, preprocess=replace(classifier.preprocess, size=(12, 12), resize=12))
    picture = np.zeros((12, 12, 3), np.uint8)
    picture[4:8, 0:8] = (20, 245, 20)
    report = check(classifier, picture, target=GREEN)
    assert "In a grid of images, the model does not recognise the class, so the image was tested alone." in report.notes
    assert {sham.order for sham in report.controls} <= {None}


# Options


def test_other_pictures_may_stand_beside(colours: gradcam.Classifier, green: Path, tmp_path: Path) -> None:
    reds = [colour_model.paint(tmp_path / f"{number}.png", 0, seed=number) for number in range(3)]
    cyan = colour_model.paint(tmp_path / "cyan.png", 4)
    report = check(colours, green, other_images=[green, *reds, cyan])
    corners = report.artifacts.grid.images[0].flatten(1)
    assert (corners[0] - corners[1] > 0.5).float().mean() > 0.05  # the other cells contain red squares
    with pytest.raises(ImageError):
        check(colours, green, other_images=[green, *reds, tmp_path / "none.png"])
    # Two are too few for a mosaic: the images of the package are used.
    with_too_few = check(colours, green, other_images=reds[:2])
    assert torch.equal(with_too_few.artifacts.grid.images, check(colours, green).artifacts.grid.images)  # type: ignore[union-attr]


def test_the_seed_decides_what_is_drawn(colours: gradcam.Classifier, green: Path) -> None:
    first, repeated, reseeded = (check(colours, green, seed=seed).to_record() for seed in (3, 3, 4))
    assert first == repeated
    by_name = [{control["name"]: control["effect"] for control in record["controls"]} for record in (first, reseeded)]
    assert by_name[0]["noise"] != by_name[1]["noise"]
    assert by_name[0]["mirrored"] == by_name[1]["mirrored"]


def test_nothing_is_left_on_the_model(colours: gradcam.Classifier, green: Path) -> None:
    classifier = replace(colours, model=copy.deepcopy(colours.model).train())
    before = traces(classifier.model)
    check(classifier, green)
    assert_same(before, traces(classifier.model))


def test_a_class_a_layer_and_a_score_can_be_named() -> None:
    tiny = gradcam.load_classifier(tiny_model(), size=(24, 32), layer="3")
    picture = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    report = check(tiny, picture, target=2, layer="1", score="contrast", method="HiResCAM")
    assert (report.index, report.layer, report.score, report.method) == (2, "1", "contrast", "hirescam")
    target = gradcam.targets.ClassTarget(2, score="contrast")
    expected = tiny.explain(picture, "1", method="hirescam", target=target).heatmaps[0, 0]
    assert torch.equal(report.artifacts.heatmap, expected)
    assert report.probability == pytest.approx(float(tiny.explain(picture).probabilities()[0, 2]), abs=1e-6)
    assert 2 not in report.artifacts.rivals
    assert len(set(report.artifacts.rivals)) == 4


def test_a_class_by_its_label(classifier: gradcam.Classifier, photo: Photo) -> None:
    report = check(classifier, photo("koala.webp"), target="wombat", method="constant")
    assert (report.index, report.label, report.class_name) == (106, "wombat", "wombat (106)")


def test_two_classes_are_compared_with_one_another() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1))
    torch.manual_seed(3)
    nn.init.normal_(model[4].weight)
    picture = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    report = check(gradcam.load_classifier(model, size=(24, 32), layer="1"), picture, method="edges")
    assert report.artifacts.rivals == (1 - report.index,)  # type: ignore[operator]
    assert report.tests[-1].value == 1
    assert report.outcome == "failed"


def test_progress_goes_up_to_its_end(colours: gradcam.Classifier, green: Path) -> None:
    messages: list[tuple[int, int]] = []
    check(colours, green, progress=lambda count, total: messages.append((count, total)))
    counts = [count for count, _ in messages]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert {total for _, total in messages} == {counts[-1]}


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"method": "gradcm"}, GradcamError, "There is no method or control 'gradcm'. Nearest: 'gradcam'"),
        ({"score": "loss"}, TargetError, "There is no score 'loss'"),
        ({"seed": 1.5}, GradcamError, "seed is 1.5, expected an int"),
        ({"seed": True}, GradcamError, "seed is True"),
        ({"target": [[0, 1]]}, TargetError, "There are 2 classes per image, expected one"),
        ({"target": 5}, TargetError, "Class 5 does not exist"),
        ({"layer": "9"}, GradcamError, "There is no layer '9'"),
        ({"method": lambda *_: torch.zeros(1, 4, 4)}, ImageError, r"the shape \(1, 4, 4\), expected"),
        ({"method": lambda *_: torch.full((1, 32, 32), torch.nan)}, ImageError, "NaN"),
    ],
)
def test_what_cannot_be_checked(
    options: dict[str, object], kind: type[Exception], message: str, colours: gradcam.Classifier, green: Path
) -> None:
    with pytest.raises(kind, match=message):
        check(colours, green, **options)  # type: ignore[arg-type]


def test_the_worst_test_decides(koala: Verdict) -> None:
    first, *later = koala.tests
    assert replace(koala, tests=(replace(first, outcome="undecided"), *later)).outcome == "undecided"
    both = (replace(first, outcome="failed"), replace(later[0], outcome="undecided"), *later[1:])
    assert replace(koala, tests=both).outcome == "failed"
    assert replace(koala, doubt="its cells lie elsewhere").outcome == "failed"


def test_the_record_is_json(koala: Verdict) -> None:
    record = json.loads(json.dumps(koala.to_record(), allow_nan=False))
    assert record["outcome"] == "passed"
    assert [test["name"] for test in record["tests"]] == list(QUESTIONS)
    assert set(record["tests"][0]) == {"name", "outcome", "value", "reason"}
    assert record["distinguished_from"] == koala.distinguished_from
    first = record["controls"][0]
    assert (first["name"], first["is_distinguished"]) == ("mirrored", True)
    assert record["shams"][0]["is_apart"] is True  # the field names of earlier versions
    assert record["told_apart"][2] == "another picture"
    assert first["order"] == koala.controls[0].order
    assert record["same_map"] == koala.rival


# Uncertainty of a map


def test_uncertainty_is_the_deviation_over_views_and_noise(colours: gradcam.Classifier, green: Path) -> None:
    images, classes = colours.batch([green]), torch.tensor([GREEN])
    explain = gradcam_of(colours)
    actual = uncertainty(explain, colours.model, images, classes, samples=0)
    maps = [explain(colours.model, images, classes)[0].numpy()]
    for down, right in ((2, 0), (-2, 0), (0, 2), (0, -2)):  # views shifted by a sixteenth of 32 pixels
        view = torch.from_numpy(np.roll(images.numpy(), (down, right), (2, 3)))
        maps.append(np.roll(explain(colours.model, view, classes)[0].numpy(), (-down, -right), (0, 1)))
    maps.append(np.flip(explain(colours.model, images.flip(3), classes)[0].numpy(), 1))
    expected = np.std([heatmap / heatmap.max() for heatmap in maps], axis=0)
    np.testing.assert_allclose(actual[0].numpy(), expected, atol=1e-6)
    assert expected.max() > 0.1
    assert not torch.equal(actual, uncertainty(explain, colours.model, images, classes, samples=3))


def test_a_map_that_never_changes_is_certain() -> None:
    images = torch.rand(2, 3, 16, 16)
    actual = uncertainty(lambda model, images, classes: torch.ones(1, 16, 16), nn.Identity(), images, [0, 0])
    assert actual.shape == (2, 16, 16)
    assert not actual.any()


# The panel


def find(panel: np.ndarray, cell: np.ndarray) -> list[tuple[int, int]]:
    height, width = cell.shape[:2]
    corner = (panel[: 1 - height or None, : 1 - width or None] == cell[0, 0]).all(2)
    return [
        (int(y0), int(x0))
        for y0, x0 in zip(*np.nonzero(corner))
        if np.array_equal(panel[y0 : y0 + height, x0 : x0 + width], cell)
    ]


def test_the_panel_shows_what_the_tests_looked_at(koala: Verdict) -> None:
    panel, artifacts = koala.panel(height=120), koala.artifacts
    picture = scale_to_height(koala.image, 120)
    full_region = (0, 0, *picture.shape[:2])
    positions = find(panel, overlay(picture, artifacts.heatmap, region=full_region))
    # The rows of stability, classes and weights begin with the explained heatmap.
    assert [x0 for _, x0 in positions] == [MARGIN] * 3
    tops = [y0 for y0, _ in positions]
    ((y0, x0),) = find(panel, overlay(picture, (2 * artifacts.uncertainty).clamp(0, 1), region=full_region))
    assert (y0, x0 > MARGIN) == (tops[0], True)
    assert find(panel, overlay(picture, artifacts.rival_maps[0], region=full_region))[0][0] == tops[1]
    assert find(panel, overlay(picture, artifacts.randomisation.heatmaps[0, -1], region=full_region))[0][0] == tops[2]


@pytest.mark.parametrize("outcome", ["passed", "undecided", "failed"])
def test_the_panel_writes_each_outcome_in_its_colour(outcome: str, koala: Verdict) -> None:
    tests = tuple(replace(test, outcome=outcome) for test in koala.tests)  # type: ignore[arg-type]
    panel = replace(koala, tests=tests).panel(height=20)
    colours = {"passed": (15, 115, 55), "undecided": (170, 100, 0), "failed": (190, 25, 25)}
    written = {name: int((panel == colour).all(2).sum()) for name, colour in colours.items()}
    assert written[outcome] > 100
    assert sum(written.values()) == written[outcome]


def test_long_names_stay_on_the_panel(koala: Verdict) -> None:
    label = "a very long name of a class, " * 20
    artifacts = replace(koala.artifacts, rival_names=(label,) * 4)
    panel = replace(koala, artifacts=artifacts, label=label, method="m" * 300).panel(height=40)
    assert panel.shape[1] == koala.panel(height=40).shape[1]
    assert (panel[:, -MARGIN // 2 :] == 255).all()


@pytest.mark.parametrize("height", [0, 2.5, True, "a"])
def test_a_height_that_cannot_be(height: object, koala: Verdict) -> None:
    with pytest.raises(ImageError, match="expected the height of each image in pixels"):
        koala.panel(height=height)  # type: ignore[arg-type]
