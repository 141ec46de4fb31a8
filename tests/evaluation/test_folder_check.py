"""Test the verdict over a set of images: the bugs that it finds, its numbers and its messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import gradcam
from gradcam.errors import GradcamError, ImageError, ModelError, TargetError
from gradcam.evaluation import FolderVerdict, check
from gradcam.evaluation.checks.folder import measure_image
from gradcam.evaluation.checks.map_evidence import compute_exact_maps
from gradcam.evaluation.explainers import Explainer
from tests import colour_model
from tests.helpers import strict

HeatmapFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]
SCHEMA = Path(__file__).parents[2] / "docs" / "reference" / "folder_check.schema.json"
CELL = 4  # pixels per cell of the colour model
OPTIONS = {"method": None, "layer": None, "target": None, "score": "logit", "reshape": None, "seed": 0}


def by_hand(model: Any, images: Tensor, classes: Tensor) -> Tensor:
    """Return Grad-CAM of the colour model without the package: the ReLU's channel of the class."""
    with torch.no_grad():
        maps = model.relu(model.cells(images))
    maps = maps.gather(1, classes.reshape(-1, 1, 1, 1).expand(-1, 1, *maps.shape[2:]))
    return F.interpolate(maps, images.shape[2:], mode="bilinear", align_corners=False)[:, 0]


def move(heatmaps: Tensor, across: int, down: int = 0) -> Tensor:
    return F.pad(heatmaps, (across, -across, down, -down))


def crop_and_stretch(model: Any, images: Tensor, classes: Tensor) -> Tensor:
    height, width = images.shape[2:]
    left = (width - height) // 2
    heatmaps = by_hand(model, images[:, :, :, left : left + height].contiguous(), classes)
    return F.interpolate(heatmaps[:, None], (height, width), mode="bilinear")[:, 0]


def paint(seed: int, *, height: int = 32, width: int = 32) -> np.ndarray:
    """Return an image of a large square of one colour and a small square of the next colour, on dark noise."""
    rng = np.random.default_rng(seed)
    image = (rng.random((height, width, 3)) * 40).astype(np.uint8)
    for colour, side, left in ((seed % 5, 10, 0), ((seed + 1) % 5, 6, width // 2)):
        y0, x0 = int(rng.integers(0, height - side)), left + int(rng.integers(0, width // 2 - side))
        image[y0 : y0 + side, x0 : x0 + side] = np.array(colour_model.COLOURS[colour]) * 225 + 20
    return image


IMAGES = [paint(seed) for seed in range(8)]


@pytest.fixture(scope="module")
def colours() -> gradcam.Classifier:
    return colour_model.load()


def examine(
    classifier: gradcam.Classifier, method: Any, images: Sequence[Any] = IMAGES, targets: Sequence[Any] | None = None
) -> FolderVerdict:
    """Return the verdict over images without the tests of each image."""
    evidence = [
        measure_image(
            classifier, image, {**OPTIONS, "method": method, "target": None if targets is None else targets[i]}
        )
        for i, image in enumerate(images)
    ]
    return FolderVerdict((), tuple(item for items in evidence for item in items))


# The bugs


@pytest.mark.parametrize(
    "method", [by_hand, "gradcam", "layercam", "hirescam"], ids=["by hand", "gradcam", "layercam", "hirescam"]
)
def test_correct_heatmaps_have_no_bug(colours: gradcam.Classifier, method: Any) -> None:
    verdict = examine(colours, method)
    assert verdict.bugs == ()
    assert max(verdict.to_record()["deviations"]) < 1e-5
    assert min(verdict.to_record()["rank_correlations"]) > (0.7 if callable(method) else 0.999)


@pytest.mark.filterwarnings("ignore:The model's output is probabilities")  # The colour model's output is in [0,1].
@pytest.mark.parametrize("method", ["gradcam", "layercam", "hirescam", "xgradcam"])
def test_the_methods_of_the_package_have_no_bug_as_functions(colours: gradcam.Classifier, method: str) -> None:
    assert examine(colours, Explainer((method,), colours.layer, activation=colours.activation).only(method)).bugs == ()


BUGS: list[tuple[str, str, HeatmapFunction]] = [
    ("displaced", "1.0 grid cells right", lambda m, i, c: move(by_hand(m, i, c), CELL)),
    ("displaced", "1.0 grid cells left", lambda m, i, c: move(by_hand(m, i, c), -CELL)),
    ("displaced", "0.5 grid cells down", lambda m, i, c: move(by_hand(m, i, c), 0, CELL // 2)),
    ("displaced", "1.0 grid cells right and 1.0 grid cells up", lambda m, i, c: move(by_hand(m, i, c), CELL, -CELL)),
    ("mirrored", "left and right", lambda m, i, c: by_hand(m, i, c).flip(2)),
    ("mirrored", "top and bottom", lambda m, i, c: by_hand(m, i, c).flip(1)),
    ("mirrored", "180", lambda m, i, c: by_hand(m, i, c).flip(1, 2)),
    ("swapped", "x and y", lambda m, i, c: by_hand(m, i, c).mT),
    ("class", "class +1", lambda m, i, c: by_hand(m, i, (c + 1) % 5)),
    ("class", "class -1", lambda m, i, c: by_hand(m, i, (c - 1) % 5)),
    ("colour", "BGR", lambda m, i, c: by_hand(m, i.flip(1), c)),
]


@pytest.mark.parametrize(("kind", "words", "method"), BUGS, ids=[f"{kind} {words}" for kind, words, _ in BUGS])
def test_each_bug_is_named(colours: gradcam.Classifier, kind: str, words: str, method: HeatmapFunction) -> None:
    verdict = examine(colours, method)
    (bug,) = verdict.bugs
    assert bug.kind == kind
    assert words in bug.text
    assert bug.gain.mean > 0.02
    assert bug.gain.n == len(IMAGES)
    assert verdict.outcome == "failed"


def test_the_displacement_is_measured_in_cells(colours: gradcam.Classifier) -> None:
    displacement = examine(colours, lambda m, i, c: move(by_hand(m, i, c), 3, -6)).displacement
    for name, cells in (("across", 3 / CELL), ("down", -6 / CELL), ("distance", 45**0.5 / CELL)):
        assert displacement[name].mean == pytest.approx(cells, abs=0.1)
        assert displacement[name].low - 0.05 <= cells <= displacement[name].high + 0.05


def test_a_stretched_crop_is_found_in_wide_images(colours: gradcam.Classifier) -> None:
    images = [paint(seed, width=64) for seed in range(10)]
    whole = replace(colours, fit="whole")
    assert examine(whole, by_hand, images).bugs == ()
    assert [bug.kind for bug in examine(whole, crop_and_stretch, images).bugs] == ["crop"]


def test_a_wrong_order_in_the_preprocessing_is_found_by_the_probabilities(colours: gradcam.Classifier) -> None:
    chosen_images = [image for seed, image in enumerate(IMAGES) if seed % 5 != 1] * 2  # Green has no other order.
    targets = [seed % 5 for seed in range(len(IMAGES)) if seed % 5 != 1] * 2
    assert examine(colours, by_hand, chosen_images, targets).bugs == ()
    (bug,) = examine(colours, by_hand, [image[..., ::-1].copy() for image in chosen_images], targets).bugs
    assert (bug.kind, "better with BGR" in bug.text) == ("colour", True)


def test_a_bug_is_not_named_from_noise(colours: gradcam.Classifier) -> None:
    def noise(model: Any, images: Tensor, classes: Tensor) -> Tensor:
        coarse = torch.rand(len(images), 1, 4, 4, generator=torch.Generator().manual_seed(int(images.sum() * 1e3)))
        return F.interpolate(coarse, images.shape[2:], mode="bilinear")[:, 0]

    verdict = examine(colours, noise)
    assert verdict.bugs == ()
    assert any(
        note.startswith("The heatmaps match neither gradcam's heatmaps nor a known bug") for note in verdict.notes
    )


# The network's own offset


@pytest.mark.parametrize("width", [224, 256])
def test_the_offset_of_a_residual_network_is_half_a_cell(width: int) -> None:
    torch.manual_seed(0)
    classifier = gradcam.load_classifier(torchvision.models.resnet18(weights=None).eval(), layer="layer4", size=width)
    explainer = Explainer(("gradcam",), "layer4")
    image = np.random.default_rng(0).integers(0, 256, (width, width, 3), np.uint8)
    exact = compute_exact_maps(classifier, classifier.prepare(image), explainer)
    # Five strides of 2 with symmetric kernels centre cell j at pixel 32 j, which is drawn at pixel 32 j + 15.5.
    assert exact.evidence.network_offset == pytest.approx((-15.5 / 32,) * 2, abs=0.1)


def test_the_offset_of_the_network_is_no_bug(colours: gradcam.Classifier) -> None:
    model = colour_model.make().eval()
    with torch.no_grad():
        model.cells.weight[:, :, :2, :2] *= 4  # The cells depend on the top left quarter of their pixels.
        model.cells.weight[:, :, 2:] = 0
        model.cells.weight[:, :, :, 2:] = 0
    offset, images = replace(colours, model=model), [paint_centre(seed) for seed in range(8)]
    assert examine(colours, by_hand, images).network_offset == pytest.approx((0, 0), abs=0.01)
    verdict = examine(offset, by_hand, images)
    assert verdict.network_offset == pytest.approx((-1 / CELL, -1 / CELL), abs=0.01)
    assert verdict.bugs == ()
    assert any("are offset by (-0.25, -0.25) grid cells" in note for note in verdict.notes)
    assert examine(offset, lambda m, i, c: move(by_hand(m, i, c), -1, -1), images).bugs == ()
    bugs = examine(offset, lambda m, i, c: move(by_hand(m, i, c), 2, 2), images).bugs
    assert [bug.kind for bug in bugs] == ["displaced"]


def paint_centre(seed: int) -> np.ndarray:
    """Return an image with a square that covers the centre, where the network's offset is measured."""
    rng = np.random.default_rng(seed)
    image = (rng.random((32, 32, 3)) * 40).astype(np.uint8)
    y0, x0 = rng.integers(3, 13, 2)
    image[y0 : y0 + 16, x0 : x0 + 16] = np.array(colour_model.COLOURS[seed % 5]) * 225 + 20
    return image


# The verdict over the images


def test_a_list_of_images_gets_one_verdict_each(colours: gradcam.Classifier) -> None:
    steps: list[tuple[int, int]] = []
    verdict = check(colours, IMAGES[:6], method=by_hand, progress=lambda done, total: steps.append((done, total)))
    assert isinstance(verdict, FolderVerdict)
    others = [image for image in IMAGES[:6] if image is not IMAGES[2]]
    alone = check(colours, IMAGES[2], method=by_hand, other_images=others)
    assert verdict.verdicts[2].to_record() == alone.to_record()
    assert [item.class_index for item in verdict.evidence] == [0, 1, 2, 3, 4, 0]
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]
    record = json.loads(json.dumps(verdict.to_record()))
    assert (record["images"], record["bugs"], record["reference"]) == (6, [], "gradcam")
    count = sum(item.outcome == "passed" for item in verdict.verdicts)
    assert verdict.summary.startswith(f"{count} of 6 images passed (95 % interval: ")
    assert verdict.outcome == (
        "failed" if [item.outcome for item in verdict.verdicts].count("failed") > 3 else verdict.outcome
    )


def test_the_largest_difference_is_reported(colours: gradcam.Classifier) -> None:
    def dim(model: Any, images: Tensor, classes: Tensor) -> Tensor:
        heatmaps = by_hand(model, images, classes)
        return heatmaps / heatmaps.amax() * 0.6 + 0.4  # A map whose minimum is drawn as 0.4.

    assert examine(colours, dim).to_record()["deviations"] == pytest.approx([0.4] * len(IMAGES), abs=1e-3)


def test_other_tasks_get_only_their_verdicts(colours: gradcam.Classifier) -> None:
    verdict = FolderVerdict((), ())
    assert (verdict.bugs, verdict.displacement, verdict.reference) == ((), {}, None)
    assert verdict.notes == ["Systematic bugs are tested only if the target is a class."]


# Wrong input


def test_too_few_images(colours: gradcam.Classifier) -> None:
    with pytest.raises(
        GradcamError, match=r"^A verdict over several images needs at least 6 images, got 2: add images, or check"
    ):
        check(colours, IMAGES[:2])


def test_a_target_for_each_image(colours: gradcam.Classifier) -> None:
    with pytest.raises(TargetError, match=r"^There are 2 targets and 6 images: pass one target, or one per image\.$"):
        check(colours, IMAGES[:6], target=[0, 1])
    assert [item.index for item in check(colours, IMAGES[:6], target=["red"] * 5 + [1]).verdicts] == [0] * 5 + [1]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lambda m, i, c: by_hand(m, i, c)[:, ::2], r"shape \(1, 16, 32\), expected \(1, 32, 32\)"),
        (lambda m, i, c: by_hand(m, i, c) * float("nan"), "contain NaN"),
        (lambda m, i, c: by_hand(m, i, c).expand(2, -1, -1), r"shape \(2, 32, 32\), expected \(1, 32, 32\)"),
    ],
    ids=["size", "nan", "number"],
)
def test_wrong_heatmaps_name_the_image(colours: gradcam.Classifier, method: HeatmapFunction, message: str) -> None:
    with pytest.raises(ImageError, match=rf"^Image 1 of 6: [^\n]*{message}[^\n]*$"):
        check(colours, IMAGES[:6], method=method)


def test_constant_heatmaps_and_one_class(colours: gradcam.Classifier) -> None:
    def constant(model: Any, images: Tensor, classes: Tensor) -> Tensor:
        return torch.ones_like(images[:, 0])

    red = [paint(5 * seed) for seed in range(6)]
    verdict = check(colours, red, method=constant)
    schema = strict(json.loads(SCHEMA.read_text(encoding="utf-8")))
    for result in (verdict, replace(verdict, evidence=())):  # Other tasks have no evidence.
        record = {"schema": 1, "model": "colours", "method": "constant", "folder": result.to_record()}
        jsonschema.validate(json.loads(json.dumps(record, allow_nan=False)), schema)
    assert (verdict.outcome, verdict.bugs) == ("failed", ())
    assert "6 of 6 heatmaps are constant: they highlight no part of the image." in verdict.notes
    assert any(note.startswith("All images have the same class") for note in verdict.notes)


def test_images_of_which_the_model_is_unsure(colours: gradcam.Classifier) -> None:
    blank = [np.full((32, 32, 3), value, np.uint8) for value in range(6)]
    notes = examine(colours, by_hand, blank).notes
    assert any(note.startswith("In 6 of 6 images, the class has a probability below 50 %") for note in notes)


class OneSize(nn.Module):
    """The colour model with an input of 32 x 32 pixels only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = colour_model.make()
        self.relu = self.body.relu

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[2:] != (32, 32):
            raise RuntimeError("expected 32 x 32 pixels")
        return self.body(images)


def test_a_model_that_takes_one_size(colours: gradcam.Classifier) -> None:
    classifier = replace(colours, model=OneSize().eval())
    images = [paint(seed, width=64) for seed in range(6)]
    with pytest.raises(ModelError, match=r"^Image 1 of 6: The model takes only 32 x 32 pixels[^\n]*$"):
        check(replace(classifier, fit="whole"), images)
    function = lambda model, images, classes: by_hand(model.body, images, classes)  # noqa: E731
    assert examine(classifier, function, images).bugs == ()
