"""Test how results present themselves: class names, captions, files, notebooks, and lines at a Python prompt."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import gradcam
from gradcam import attributions, evaluation
from gradcam.cli import cli
from gradcam.errors import ImageError
from gradcam.images.draw import join_rows
from gradcam.targets import ClassTarget
from tests.helpers import tiny_model

Photo = Callable[[str], Path]
CAT_AND_CUP = "cat_and_espresso.jpg"
MAX_REPR_CHARACTERS = 200  # at a Python prompt


@pytest.fixture(scope="module")
def explanation(classifier: gradcam.Classifier, photo: Photo) -> Any:
    """Return the explanation of the cat and of the cup."""
    return classifier.explain(photo(CAT_AND_CUP), target=[["Egyptian cat", "espresso"]])


@pytest.fixture(scope="module")
def attribution(classifier: gradcam.Classifier, photo: Photo) -> Any:
    return classifier.attribute(photo(CAT_AND_CUP), "input-gradients", target="espresso")


@pytest.fixture(scope="module")
def array_explanation() -> gradcam.Explanation:
    """Return an explanation of two tensors with three classes each, without images to draw on."""
    return gradcam.explain(tiny_model(), torch.rand(2, 3, 24, 32), "3", target=[[0, 1, 2], [3, 4, 0]])


# Names and captions


def test_a_class_has_a_name_and_a_probability(explanation: Any) -> None:
    probabilities = explanation.output.softmax(1)[0]
    for k, (name, index) in enumerate({"Egyptian cat": 285, "espresso": 967}.items()):
        assert explanation.label(0, k) == name
        assert explanation.probability(0, k) == pytest.approx(probabilities[index].item())
        share = f"{100 * probabilities[index].item():.0f} %"
        assert explanation.caption(0, k) == f"{name} ({index}), {share}, by gradcam at layer4"
    assert (explanation.label(), explanation.label(k=-1)) == ("Egyptian cat", "espresso")
    for ask in (explanation.label, explanation.probability, explanation.caption):
        with pytest.raises(ImageError, match=r"There is no class \[0, 2\]: there are 1 image\(s\), with 2"):
            ask(0, 2)


def test_an_attribution_has_a_name_and_a_probability(attribution: Any, explanation: Any) -> None:
    assert attribution.label() == "espresso"
    assert attribution.probability() == pytest.approx(explanation.probability(0, 1), abs=1e-4)
    assert re.fullmatch(r"espresso \(967\), \d+ %, by input-gradients", attribution.caption())


def test_labels_and_probabilities_may_be_unknown(classifier: gradcam.Classifier, photo: Photo) -> None:
    explanation = classifier.explain(photo("coffee.jpg"), target=lambda output: output[:, :2], evidence="signed")
    assert (explanation.label(0, 1), explanation.probability(0, 1)) == (None, None)
    assert explanation.caption(0, 1) == "score 1, signed evidence by gradcam at layer4"
    unlabelled = gradcam.load_classifier(tiny_model(), size=(24, 32), layer="3").explain(photo("coffee.jpg"), target=2)
    assert unlabelled.label() is None
    assert re.fullmatch(r"class 2, \d+ %, by gradcam at 3", unlabelled.caption())


def test_a_class_of_one_of_several_heads_has_a_caption(photo: Photo) -> None:
    class TwoHeads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = tiny_model()

        def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.body(images)
            return {"kind": scores, "colour": scores * 2}

    preprocess = gradcam.load_classifier(tiny_model(), size=(24, 32), layer="3").preprocess
    classifier = gradcam.Classifier("two", TwoHeads().eval(), preprocess, 5, None, "body.3")
    explanation = classifier.explain(photo("coffee.jpg"), target=ClassTarget(1, output="kind"))
    assert explanation.caption() == "class 1, by gradcam at body.3"


# In a notebook


def test_a_notebook_shows_an_attribution_with_its_caption(attribution: Any) -> None:
    text = attribution._repr_html_()
    assert re.findall("<figcaption>(.*?)</figcaption>", text) == [attribution.caption()]
    (image,) = [Image.open(io.BytesIO(base64.b64decode(item))) for item in re.findall('base64,(.*?)"', text)]
    assert image.size == (800, 640)
    assert attribution._repr_png_().startswith(b"\x89PNG")


def test_a_notebook_shows_several_pictures_with_their_captions(photo: Any) -> None:
    explanation = gradcam.load_classifier().explain([photo("coffee.jpg"), photo("rocket.jpg")])
    captions = re.findall("<figcaption>(.*?)</figcaption>", explanation._repr_html_())
    assert captions == [explanation.caption(0), explanation.caption(1)]


def test_a_notebook_shows_a_page_that_needs_no_kernel(explanation: Any) -> None:
    text = explanation._repr_html_()
    assert text.startswith("<iframe srcdoc=")
    assert "allow-same-origin" not in text  # The page's scripts cannot reach the notebook.
    page = html.unescape(re.findall('srcdoc="(.*?)" sandbox', text, re.S)[0])
    data = json.loads(re.findall('id="data">(.*?)</script>', page)[0])
    assert data["targets"]["names"] == [explanation.label(0, k) for k in range(2)]
    assert explanation._repr_png_().startswith(b"\x89PNG")


def test_labels_are_escaped(explanation: Any) -> None:
    labels = list(explanation.labels)
    labels[285] = '</script><img src=x onerror="alert(1)"> & more'
    text = replace(explanation, labels=labels)._repr_html_()
    assert "<img src=x" not in text
    assert 'onerror="' not in text
    assert "<img src=x" not in html.unescape(text)


# Files


def test_an_overlay_is_saved(explanation: Any, attribution: Any, tmp_path: Path) -> None:
    explanation.save(tmp_path / "cat.png", 0, 0)
    explanation.save(str(tmp_path / "cup.png"), k=1, alpha=0.9, colormap="viridis")
    explanation.save(tmp_path / "both.png")
    attribution.save(tmp_path / "fine.png")
    expected = {
        "cat.png": explanation.overlay(),
        "cup.png": explanation.overlay(0, 1, alpha=0.9, colormap="viridis"),
        "both.png": join_rows([[explanation.overlay(), explanation.overlay(0, 1)]]),
        "fine.png": attribution.draw(),
    }
    assert {path.name for path in tmp_path.iterdir()} == set(expected)
    for name, picture in expected.items():
        np.testing.assert_array_equal(gradcam.read_image(tmp_path / name), picture, name)


def test_all_of_an_explanation_is_saved(
    explanation: Any, array_explanation: gradcam.Explanation, tmp_path: Path
) -> None:
    for results in (explanation, array_explanation):
        results.save(tmp_path / "all.npz")
        with np.load(tmp_path / "all.npz") as arrays:
            assert set(arrays) == {"maps", "heatmaps", "classes", "scores", "layer", "method", "evidence"}
            for name in ("maps", "heatmaps", "classes", "scores"):
                np.testing.assert_array_equal(arrays[name], getattr(results, name).numpy(), name)
            texts = [str(arrays[name]) for name in ("layer", "method", "evidence")]
            assert texts == [results.layer, "gradcam", "positive"]
    array_explanation.save(tmp_path / "some.npz", 1, -1)
    with np.load(tmp_path / "some.npz") as arrays:
        np.testing.assert_array_equal(arrays["heatmaps"], array_explanation.heatmaps[1:, 2:].numpy())
    of_function = gradcam.explain(tiny_model(), torch.rand(1, 3, 24, 32), "3", target=lambda output: output[:, 0])
    of_function.save(tmp_path / "function.npz")
    with np.load(tmp_path / "function.npz") as arrays:
        assert "classes" not in arrays


def test_all_of_an_attribution_is_saved(tmp_path: Path) -> None:
    attribution = attributions.input_gradients(tiny_model(), torch.rand(2, 3, 24, 32), target=1)
    attribution.save(tmp_path / "all.npz")
    with np.load(tmp_path / "all.npz") as arrays:
        assert set(arrays) == {"values", "classes", "scores", "method"}
        np.testing.assert_array_equal(arrays["values"], attribution.values.numpy())
    attribution.save(tmp_path / "one.npy", 1, 0)
    np.testing.assert_array_equal(np.load(tmp_path / "one.npy"), attribution.values[1, 0].numpy())


def test_one_map_is_saved_as_a_batch_does(classifier: gradcam.Classifier, photo: Photo, tmp_path: Path) -> None:
    command = ["batch", str(photo("koala.webp")), "-o", str(tmp_path / "out"), "--save", "map", "--quiet"]
    cli.main(command, standalone_mode=False)
    (written,) = (tmp_path / "out").glob("*.npy")
    classifier.explain(photo("koala.webp")).save(tmp_path / "map.npy")
    theirs, ours = np.load(written), np.load(tmp_path / "map.npy")
    assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


NO_IMAGE = r"no image to draw on. .*load_classifier\(model\).explain\('photo.jpg'\).save\('.*a.png'\).* region=.* .npz"


@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        ("a.png", (), NO_IMAGE),
        ("a.gif", (), r"a.gif: expected an image suffix \(.bmp, .*\), or .npz or .npy"),
        ("a", (), "expected an image suffix"),
        ("a.npy", (), "a.npy: .npy stores one map, but there are 6: choose one with i and k, or save all maps as .npz"),
        ("a.npy", (1,), "stores one map, but there are 3"),
        ("a.npy", (2, 0), r"There is no map \[2, 0\]: there are 2 image\(s\), with 3 map\(s\) each"),
        ("a.npz", (None, 3), r"There is no map \[:, 3\]"),
        ("none/a.npz", (), "a.npz: cannot be written"),
    ],
)
def test_invalid_files_are_refused(
    array_explanation: gradcam.Explanation, tmp_path: Path, name: str, place: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ImageError, match=message):
        array_explanation.save(tmp_path / name, *place)
    assert list(tmp_path.iterdir()) == []


def test_no_partial_file_remains(explanation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.npz").write_bytes(b"before")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    for name in ("a.npz", "a.npy", "a.png"):
        with pytest.raises(ImageError, match=f"{name}: cannot be written \\(No space left on device\\)"):
            explanation.save(tmp_path / name, 0, 0)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.npz", b"before")]


# At a prompt


def test_a_report_prints_its_conclusion() -> None:
    classifier = gradcam.load_classifier(tiny_model(), size=(24, 32), layer="3", labels=["a" * 500, *"bcde"])
    picture = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    verdict = evaluation.check(classifier, picture, target=1)
    message = repr(verdict)
    assert message.startswith(f"Verdict({verdict.outcome}: 'b (1)' by gradcam at 3; ")
    for test in verdict.tests:
        assert f"{test.name} {test.outcome} ({test.value:.2g})" in message
    doubtful = replace(verdict, index=0, label=classifier.label(0), doubt="its cells lie elsewhere " * 20)
    assert "failed" in repr(doubtful)
    assert "its cells lie elsewhere" in repr(doubtful)
    for value in (verdict, verdict.tests[0], verdict.artifacts):
        assert len(repr(value)) <= MAX_REPR_CHARACTERS
        assert "\n" not in repr(value)
    assert len(repr(doubtful)) <= MAX_REPR_CHARACTERS + 100


@pytest.mark.slow
def test_results_fit_a_prompt(classifier: gradcam.Classifier, photo: Photo, explanation: Any, attribution: Any) -> None:
    classifier_of_tensors = gradcam.load_classifier(tiny_model(), size=(24, 32), layer="3")
    pictures = np.random.default_rng(0).integers(0, 256, (70, 24, 32, 3), dtype=np.uint8)
    images = classifier_of_tensors.batch(pictures)
    subject = evaluation.Subject(classifier_of_tensors.model, images)
    heatmaps, prepared = (
        classifier_of_tensors.explain(pictures).heatmaps[:, 0],
        classifier_of_tensors.prepare(pictures[0]),
    )
    options: dict[str, Any] = {"methods": ["gradcam"], "metrics": ["complexity"], "controls": []}
    results = evaluation.evaluate(classifier_of_tensors, list(pictures[:2]), **options)
    (failed,) = gradcam.explain_files([b"nothing"], classifier_of_tensors)
    (result,) = gradcam.explain_files(photo("koala.webp"), classifier_of_tensors)
    names = ("koala.webp", "panda.webp", "macaw.webp", "coffee.jpg")
    tile = {str(place): photo(name) for place, name in enumerate(names)}
    values_by_beginning = {
        "Classifier(name='efficientnet_lite0', ": classifier,
        "ImageExplanation(": explanation,
        "ImageAttribution(": attribution,
        "Prepared(reading=Reading(values=uint8 (24, 32, 3), ": prepared,
        "Reading(values=uint8 (24, 32, 3), picture=uint8 (24, 32, 3), note=None, spacing=None)": prepared.reading,
        "FileResult(name='inputs[0]', path=None, error=ImageError(": failed,
        "FileResult(name='koala.webp', ": result,
        "LayerRow(name='0', type='Conv2d', ": gradcam.list_layers(classifier_of_tensors.model, images[:1])[0],
        "ClassTarget(classes=int64 (70, 3), top=1, ": ClassTarget(torch.zeros(70, 3, dtype=torch.int64)),
        "Road(combined=float32 (70,))": evaluation.road(subject, heatmaps),
        "Truth(masks=bool (24, 32), boxes=float64 (1, 4))": evaluation.Truth(np.ones((24, 32), bool), np.ones((1, 4))),
        "Results(2 image(s), 0 failed, methods ('gradcam',), metrics ('complexity',))": results,
        "Mosaic(names=('": evaluation.make_mosaics(classifier, tile, limit=1)[0],
    }
    for beginning, value in values_by_beginning.items():
        assert repr(value).startswith(beginning), repr(value)
        assert len(repr(value)) <= MAX_REPR_CHARACTERS, repr(value)
        assert "\n" not in repr(value)


def test_a_recommendation_names_the_best() -> None:
    from gradcam.evaluation.recommendation import Combination, Row

    interval = evaluation.mean_interval([0.1, 0.2])
    names = ("gradcam", "hirescam")
    rows = tuple(Row(Combination(name, "logit", "layer4"), *[interval] * 4) for name in names)
    answers = [evaluation.Answer(row, row, "order", interval, interval) for row in rows]
    failures = {Combination("x", None, "y"): "none"}
    data = ("a", "b") * 40, 12, (448, 448), 0, failures
    text = repr(evaluation.Recommendation("own", rows, *answers, rows[0], *data))
    best = "one object: gradcam of the logit at layer4, the default; which of several: hirescam of the logit at layer4"
    assert text == f"Recommendation({best}; for own: the best of 2 combinations on 80 image(s) in 12 mosaic(s))"
    assert len(repr(rows[0])) <= MAX_REPR_CHARACTERS
