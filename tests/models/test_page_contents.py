"""Test what a page says of targets that are not classes: masks, similarities, captions, and the code for each heatmap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradcam
from gradcam import targets
from gradcam.web.page import encode_mask
from tests.cli.test_tasks import BLUE, GREEN, MODELS, RED
from tests.detectors import make_detector

NOISE = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)
NAMESPACE: dict[str, Any] = {}
exec(MODELS, NAMESPACE)
PREPROCESSING: Any = {"mean": [0.0] * 3, "std": [1.0] * 3}


def load_segmenter(**options: Any) -> Any:
    return gradcam.load_segmenter(NAMESPACE["segmenter"](), size=32, **PREPROCESSING, **options)


def paint(*colours: tuple[int, int, int]) -> Any:
    """Return an image of 64 x 64 pixels: 32 columns of the first colour, 16 of the second, and so on."""
    edges = [*(0, 32, 48, 56, 60)[: len(colours)], 64]
    columns = [colour for i, colour in enumerate(colours) for _ in range(edges[i], edges[i + 1])]
    return np.repeat(np.array(columns, np.uint8)[None], 64, 0)


def decode(mask: dict[str, Any]) -> Any:
    """Decode the lengths of runs as docs/reference/page.md describes."""
    inside = np.arange(len(mask["runs"])) % 2 == 1
    return np.repeat(inside, mask["runs"]).reshape(mask["shape"])


@pytest.mark.parametrize("density", [0, 0.3, 0.7, 1])
def test_masks_are_lengths_of_runs(density: float) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        mask = rng.random(rng.integers(1, 9, 2)) < density
        data = encode_mask(mask)
        np.testing.assert_array_equal(decode(data), mask)
        assert min(data["runs"][1:], default=1) > 0, "only the first run may be empty"


def test_a_page_says_if_classes_have_no_heatmap() -> None:
    classifier = gradcam.load_classifier(NAMESPACE["classes"](), size=32, **PREPROCESSING)
    partial, whole = (classifier.explain(NOISE, target=[classes]).page() for classes in ([0, 2], [0, 1, 2]))
    assert partial.notes[:1] == [
        "This page has heatmaps of 2 of the model's 3 classes. Use gradcam page for all classes."
    ]
    assert not any("of the model's" in note for note in whole.notes)


def test_a_segmenter_lists_all_predicted_classes_by_area() -> None:
    segmenter, image = load_segmenter(labels=["red", "green", "blue"]), paint(GREEN, BLUE, BLUE, RED)
    page = gradcam.page(image, segmenter)
    data = page.to_data()["targets"]
    assert (data["names"], data["areas"], page.first) == (["green", "blue", "red"], [0.5, 0.375, 0.125], 0)
    for name, mask in zip(data["names"], data["masks"]):
        np.testing.assert_array_equal(decode(mask), image.argmax(2) == ["red", "green", "blue"].index(name))
    for position, index in enumerate(page.targets.indices):
        expected = segmenter.explain(image, target=targets.Mask(index), evidence="signed").maps[0, 0]
        np.testing.assert_allclose(page.maps[0].maps[position], expected.numpy(), atol=1e-6)
    assert (
        'to segment </span><strong id="shown-name">green</strong><span id="shown-after"> (50 % of the image).'
        in page.to_html()
    )


@pytest.mark.parametrize(("top", "names", "first"), [(1, ["green"], 0), (2, ["background", "green"], 1)])
def test_a_page_with_fewer_classes_includes_the_default_class(top: int, names: list[str], first: int) -> None:
    """Check that the page starts with the largest class that is not the background, and says that classes are missing."""
    segmenter = load_segmenter(labels=["background", "green", "blue"])
    page = gradcam.page(paint(RED, GREEN, BLUE), segmenter, top=top)
    assert (page.targets.names, page.first) == (names, first)
    (note,) = page.notes
    assert f"{top} of 3 predicted classes" in note
    assert not gradcam.page(paint(RED, GREEN, BLUE), segmenter).notes


def test_masks_cover_the_whole_image_at_a_small_size() -> None:
    image = np.repeat(np.repeat(paint(GREEN, RED), 6, 0), 10, 1)  # 384 x 640 pixels
    data = gradcam.page(image, load_segmenter()).to_data()["targets"]
    masks = [decode(mask) for mask in data["masks"]]
    assert [mask.shape for mask in masks] == [(154, 256)] * 2
    np.testing.assert_array_equal(masks[0], ~masks[1])
    np.testing.assert_allclose([mask.mean() for mask in masks], data["areas"], atol=0.01)


def test_an_instance_segmenter_has_boxes_and_masks() -> None:
    page = gradcam.page(NOISE, gradcam.load_detector(make_detector("maskrcnn").float()))
    data = page.to_data()["targets"]
    assert data["kind"] == "box"
    assert len(data["masks"]) == len(data["boxes"]) == len(data["names"]) > 1
    for mask, area in zip(data["masks"], data["areas"]):
        assert decode(mask).mean() == pytest.approx(area, rel=1e-3)


def test_sentences_have_similarities_instead_of_shares() -> None:
    matcher = gradcam.load_matcher(NAMESPACE["towers"](), size=32, **PREPROCESSING)
    page = gradcam.page(NOISE, matcher, target=targets.Text(["red", "green"]))
    data = page.to_data()["targets"]
    expected = matcher.explain(NOISE, target=targets.Text(["red", "green"])).scores[0]
    assert data["values"] == pytest.approx(expected.tolist(), rel=1e-3)
    assert data["shares"] == [None, None]
    assert page.targets.format_amount(1) == f"{data['values'][1]:.3f}"
    assert "masks" not in data


def test_a_caption_has_its_words_in_order() -> None:
    pytest.importorskip("transformers")
    captioner = gradcam.load_model(NAMESPACE["captioner"](), size=32)
    page = gradcam.page(NOISE, captioner)
    names = [name.split(", ")[1] for name in page.targets.names]
    assert "".join(page.to_data()["targets"]["texts"]).split(" token ")[1:] == [name.split()[1] for name in names]


def load(kind: str) -> Any:
    """Return a small model for the targets of a kind."""
    if kind in ("box", "missed"):
        return gradcam.load_detector(NAMESPACE["detector"]())
    if kind == "keypoint":
        return gradcam.load_model(make_detector("keypointrcnn").float(), task="pose")
    if kind in ("text", "like"):
        return gradcam.load_matcher(NAMESPACE["towers"](), size=32, **PREPROCESSING)
    if kind == "word":
        pytest.importorskip("transformers")
        return gradcam.load_model(NAMESPACE["captioner"](), size=32)
    return load_segmenter()


TARGETS = {
    "box": targets.Box(2, "top"), "missed": targets.MissedBox([(3.25, 4, 40, 50), (0, 0, 96, 64)]),
    "keypoint": targets.Keypoint([0, 2], "x", box=1), "text": targets.Text(["red", 'a "green"'], against=["it's blue"]),
    "like": targets.Like("other.png"), "word": targets.Token(None, [3, 1]), "mask": targets.Mask([2, 1], (7, 5, 60, 40)),
}  # fmt: skip


@pytest.mark.parametrize("kind", TARGETS)
def test_the_code_of_each_target_makes_its_heatmap(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gradcam.write_image("other.png", paint(RED, BLUE))
    model = load(kind)
    for page in (
        gradcam.page(NOISE, model, target=TARGETS[kind]),
        model.explain(NOISE, target=TARGETS[kind], evidence="signed").page(),
    ):
        assert page.targets.kind == kind
        for code, expected in zip(page.targets.code, page.maps[0].maps, strict=True):
            target = eval(code, {"gradcam": gradcam})
            options: Any = {"method": page.maps[0].method, "evidence": page.maps[0].evidence}
            maps = model.explain(NOISE, page.maps[0].layer, target=target, **options).maps
            np.testing.assert_allclose(maps[0, 0].numpy(), expected, atol=1e-5 * float(np.abs(expected).max() + 1e-9))


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("mask", targets.Mask(1, np.ones((64, 96), np.uint8))),
        ("text", targets.Text(torch.eye(3)[:1])),
        ("text", targets.Text("red", against=torch.eye(3)[1:2])),
        ("like", targets.Like(paint(RED, BLUE))),
    ],
    ids=["array", "embedding", "contrasted embedding", "reference array"],
)
def test_a_target_without_words_has_neither_command_nor_code(kind: str, target: Any) -> None:
    page = gradcam.page(NOISE, load(kind), target=target)
    assert (page.targets.words, page.targets.code) == ([None], [None])


def test_the_page_of_an_array_names_the_model_of_its_explanation(classifier: gradcam.Classifier) -> None:
    explanation = classifier.explain(NOISE, target=[[3, 5]])
    page = explanation.page()
    assert (page.name, page.words, page.code) == ("image", [], "gradcam.load_classifier()")
    assert gradcam.page(NOISE, classifier, layers=["layer4"]).name == "image"
    page = load_segmenter().explain(NOISE).page()
    assert (page.model, page.words, page.code) == (
        "Segmenter",
        ["--model", "Segmenter"],
        'gradcam.load_model("Segmenter")',
    )
    fitted = gradcam.load_classifier(fit="whole").explain(NOISE, target=[[3]]).page()
    assert (fitted.words, fitted.code) == (["--fit", "whole"], 'gradcam.load_classifier(fit="whole")')
