"""Test the embedded classifier: its network against timm's, and its explanations of photographs."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image

import gradcam
from gradcam.errors import GradcamError, ImageError, LayerError, ModelError, TargetError
from gradcam.images.draw import join_rows
from gradcam.targets import ClassTarget

Photo = Callable[[str], Path]
TOP_CLASSES = {
    "crocodile.webp": 49, "komodo_dragon.webp": 48, "koala.webp": 105, "lemur.webp": 383, "macaw.webp": 88,
    "panda.webp": 388, "polar_bear.webp": 296, "coffee.jpg": 967, "camera.png": 872,
}  # fmt: skip
CAT_AND_CUP = "cat_and_espresso.jpg"


@pytest.fixture(scope="module")
def explanation(classifier: gradcam.Classifier, photo: Photo) -> gradcam.Explanation:
    """Return the explanation of the cat and of the cup."""
    return classifier.explain(photo(CAT_AND_CUP), target=[["Egyptian cat", "espresso"]])


@pytest.mark.parametrize("size", [(224, 224), (223, 225), (160, 97)])
def test_the_network_equals_timms_with_the_same_weights(classifier: gradcam.Classifier, size: tuple[int, int]) -> None:
    theirs = timm.create_model("tf_efficientnet_lite0", pretrained=False).eval()
    weights = zip(theirs.state_dict(), classifier.model.state_dict().values(), strict=True)
    theirs.load_state_dict(dict(weights))
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        torch.testing.assert_close(classifier.model(images), theirs(images), rtol=0, atol=1e-4)


def test_the_weights_have_these_names(classifier: gradcam.Classifier) -> None:
    names = list(classifier.model.state_dict())
    parts = [name.split(".")[0] for name in names]
    assert list(dict.fromkeys(parts)) == ["stem", "layer1", "layer2", "layer3", "layer4", "head"]
    assert names[0] == "stem.0.0.weight"
    assert "layer4.4.project.1.running_var" in names
    assert names[-2:] == ["head.3.weight", "head.3.bias"]
    assert len(names) == 296


def test_the_weights_are_float32_and_frozen(classifier: gradcam.Classifier) -> None:
    floating = [tensor for tensor in classifier.model.state_dict().values() if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floating} == {torch.float32}
    assert all(tensor.isfinite().all() for tensor in floating)
    assert not any(parameter.requires_grad for parameter in classifier.model.parameters())
    assert not any(module.training for module in classifier.model.modules())


def test_the_layers_end_at_these_strides(classifier: gradcam.Classifier) -> None:
    grids: list[tuple[int, ...]] = []

    def record(module: Any, args: Any, output: torch.Tensor) -> None:
        grids.append(tuple(output.shape[1:]))

    layers = (classifier.model.get_submodule(f"layer{number}") for number in (1, 2, 3, 4))
    handles = [layer.register_forward_hook(record) for layer in layers]
    with torch.no_grad():
        classifier.model(torch.zeros(1, 3, 224, 224))
    for handle in handles:
        handle.remove()
    assert grids == [(24, 56, 56), (40, 28, 28), (112, 14, 14), (320, 7, 7)]
    assert classifier.layer == "layer4"


def test_the_labels_are_imagenets(classifier: gradcam.Classifier) -> None:
    expected = {0: "tench", 49: "African crocodile", 285: "Egyptian cat", 967: "espresso", 999: "toilet tissue"}
    assert len(classifier.labels) == 1000
    assert {index: classifier.labels[index] for index in expected} == expected


@pytest.mark.parametrize(("name", "index"), TOP_CLASSES.items())
def test_the_photographs_are_recognised(classifier: gradcam.Classifier, photo: Photo, name: str, index: int) -> None:
    explanation = classifier.explain(photo(name))
    assert explanation.classes.tolist() == [[index]]
    assert explanation.output.argmax().item() == index


def test_the_cat_is_on_the_left_and_the_cup_on_the_right(explanation: gradcam.Explanation) -> None:
    cat, cup = explanation.heatmaps[0]
    assert cat[:, :112].sum() / cat.sum() > 0.8
    assert cup[:, 112:].sum() / cup.sum() > 0.7


def test_loading_and_explaining_import_no_torchvision(photo: Photo) -> None:
    program = (
        "import sys, gradcam; gradcam.load_classifier(device='cpu').explain(sys.argv[1]).overlay();"
        "print([name for name in ('torchvision', 'timm', 'matplotlib') if name in sys.modules])"
    )
    arguments = [sys.executable, "-c", program, photo("coffee.jpg")]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=100, check=True)
    assert result.stdout == "[]\n"


def test_a_batch_stacks_the_preprocessed_images(classifier: gradcam.Classifier, photo: Photo) -> None:
    pictures = [gradcam.read_image(photo(name)) for name in ("coffee.jpg", "koala.webp")]
    torch.testing.assert_close(classifier.batch(pictures), torch.stack([classifier.preprocess(p) for p in pictures]))


def test_an_explanation_is_that_of_the_model(classifier: gradcam.Classifier, photo: Photo) -> None:
    picture = gradcam.read_image(photo("lemur.webp"))
    images = classifier.preprocess(picture)[None]
    expected = gradcam.explain(classifier.model, images, "layer3", target=[[383, 105]])
    ours = classifier.explain(photo("lemur.webp"), "layer3", target=[["Madagascar cat", "koala"]])
    assert isinstance(ours, gradcam.Explanation)
    assert (ours.layer, ours.method, ours.classes.tolist()) == ("layer3", "gradcam", [[383, 105]])
    for name in ("maps", "heatmaps", "scores", "output"):
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name))


@pytest.mark.parametrize("convert", [lambda path: path, str, gradcam.read_image, lambda path: [path]])
def test_a_picture_may_be_a_path_or_an_array(
    classifier: gradcam.Classifier, photo: Photo, convert: Callable[[Path], object]
) -> None:
    explanation = classifier.explain(convert(photo("coffee.jpg")))
    assert explanation.classes.tolist() == [[967]]
    assert explanation.scores.item() == pytest.approx(classifier.explain(photo("coffee.jpg")).scores.item(), abs=1e-5)


def test_several_pictures_of_any_size_are_explained_together(classifier: gradcam.Classifier, photo: Photo) -> None:
    names = ["koala.webp", "coffee.jpg", "camera.png"]
    together = classifier.explain([photo(names[0]), gradcam.read_image(photo(names[1])), str(photo(names[2]))])
    assert together.classes.tolist() == [[105], [967], [872]]
    for i, name in enumerate(names):
        alone = classifier.explain(photo(name))
        torch.testing.assert_close(together.heatmaps[i : i + 1], alone.heatmaps, rtol=0, atol=1e-4)
        assert together.overlay(i).shape == gradcam.read_image(photo(name)).shape


@pytest.mark.parametrize(
    ("target", "classes"),
    [
        ("koala", [[105], [105]]),
        (105, [[105], [105]]),
        ("105", [[105], [105]]),
        (["koala", "espresso"], [[105], [967]]),
        (("koala", 967), [[105], [967]]),
        ([["koala", "espresso"], ["tiger_cat", 3]], [[105, 967], [282, 3]]),
        (ClassTarget("koala"), [[105], [105]]),
        (ClassTarget([["koala"], ["espresso"]], score="probability"), [[105], [967]]),
        (ClassTarget(top=1), [[105], [967]]),
        (None, [[105], [967]]),
        (torch.tensor([1, 2]), [[1], [2]]),
    ],
)
def test_a_target_may_be_in_labels(
    classifier: gradcam.Classifier, photo: Photo, target: object, classes: list[list[int]]
) -> None:
    explanation = classifier.explain([photo("koala.webp"), photo("coffee.jpg")], target=target)
    assert explanation.classes.tolist() == classes


def test_a_target_may_be_a_function(classifier: gradcam.Classifier, photo: Photo) -> None:
    explanation = classifier.explain(photo("coffee.jpg"), target=lambda logits: logits[:, 967] - logits[:, 968])
    assert explanation.classes is None
    assert explanation.scores.item() == pytest.approx((explanation.output[0, 967] - explanation.output[0, 968]).item())


def test_probabilities_are_the_softmax_of_the_output(explanation: gradcam.Explanation) -> None:
    exponentials = np.exp(explanation.output.double().numpy())
    np.testing.assert_allclose(explanation.probabilities().numpy(), exponentials / exponentials.sum(), rtol=1e-5)


def test_an_overlay_covers_the_region_that_the_network_sees(
    classifier: gradcam.Classifier, photo: Photo, explanation: gradcam.Explanation
) -> None:
    picture = gradcam.read_image(photo(CAT_AND_CUP))
    assert classifier.region(*picture.shape[:2]) == (40, 120, 560, 560)
    for k in (0, 1):
        expected = gradcam.overlay(picture, explanation.heatmaps[0, k], region=(40, 120, 560, 560), outline=True)
        np.testing.assert_array_equal(explanation.overlay(0, k), expected)
    outside = np.ones(picture.shape[:2], dtype=bool)
    outside[40:600, 120:680] = False
    overlay = explanation.overlay(base="color")
    np.testing.assert_array_equal(overlay[outside], picture[outside])
    assert (overlay != picture).any()


def test_an_overlay_takes_an_opacity_and_a_colour_map(photo: Photo, explanation: gradcam.Explanation) -> None:
    picture = gradcam.read_image(photo(CAT_AND_CUP))
    options: dict[str, Any] = {"alpha": 0.8, "colormap": "jet"}
    expected = gradcam.overlay(picture, explanation.heatmaps[0, 1], region=(40, 120, 560, 560), **options)
    np.testing.assert_array_equal(explanation.overlay(k=1, outline=False, **options), expected)


def test_a_notebook_shows_the_overlay(classifier: gradcam.Classifier, photo: Photo) -> None:
    explanation = classifier.explain(photo("coffee.jpg"))
    array = np.asarray(Image.open(io.BytesIO(explanation._repr_png_())))
    np.testing.assert_array_equal(array, explanation.overlay())


def test_a_notebook_shows_pictures_in_rows_and_classes_in_columns(classifier: gradcam.Classifier, photo: Photo) -> None:
    paths = [photo("coffee.jpg"), photo("camera.png")]
    explanation = classifier.explain(paths, target=[["espresso", "cup"], ["tripod", "koala"]])
    array = np.asarray(Image.open(io.BytesIO(explanation._repr_png_())))
    rows = [[explanation.overlay(i, k) for k in (0, 1)] for i in (0, 1)]
    np.testing.assert_array_equal(array, join_rows(rows))


def test_an_explanation_prints_one_line(explanation: gradcam.Explanation) -> None:
    text = "ImageExplanation(1 image(s), 2 map(s) each, gradcam at layer4, 7 x 7 to 224 x 224, cpu)"
    assert repr(explanation) == text


def test_several_layers_are_explained_in_one_pass(classifier: gradcam.Classifier, photo: Photo) -> None:
    passes = []
    handle = classifier.model.register_forward_hook(lambda *_: passes.append(1))
    explanations = classifier.compare(photo("panda.webp"), layers=["layer4", "layer3"], methods=["gradcam"])
    handle.remove()
    assert len(passes) == 1
    assert list(explanations) == [("layer4", "gradcam"), ("layer3", "gradcam")]
    for (layer, _), explanation in explanations.items():
        alone = classifier.explain(photo("panda.webp"), layer)
        torch.testing.assert_close(explanation.heatmaps, alone.heatmaps, rtol=0, atol=1e-4)


def test_other_weights_are_used(classifier: gradcam.Classifier, photo: Photo, tmp_path: Path) -> None:
    state, options = classifier.model.state_dict(), {"memory_format": torch.contiguous_format}
    weights = {name: tensor.clone(**options) for name, tensor in state.items()}
    weights["head.3.bias"][105] += 100
    safetensors.torch.save_file(weights, tmp_path / "other.safetensors")
    for path in (tmp_path / "other.safetensors", str(tmp_path / "other.safetensors")):
        classifier_with_weights = gradcam.load_classifier(weights=path, device="cpu")
        expected = classifier.explain(photo("coffee.jpg"), target=105)
        explanation = classifier_with_weights.explain(photo("coffee.jpg"))
        assert explanation.classes.item() == 105
        assert explanation.scores.item() == pytest.approx(expected.scores.item() + 100, abs=1e-3)


def test_weights_in_half_precision_are_computed_with_in_float32(classifier: gradcam.Classifier, tmp_path: Path) -> None:
    weights = {name: tensor.half().contiguous() for name, tensor in classifier.model.state_dict().items()}
    weights |= {name: t for name, t in classifier.model.state_dict().items() if not t.is_floating_point()}
    safetensors.torch.save_file(weights, tmp_path / "half.safetensors")
    half_classifier = gradcam.load_classifier(weights=tmp_path / "half.safetensors", device="cpu")
    for name, tensor in half_classifier.model.state_dict().items():
        assert torch.equal(tensor, classifier.model.state_dict()[name]), name


def test_an_index_out_of_range_is_refused(classifier: gradcam.Classifier) -> None:
    explanation = classifier.explain(np.zeros((20, 20, 3), np.uint8), target=3)
    for index in ((1, 0), (0, 1), (-2, 0)):
        with pytest.raises(ImageError, match="there are 1 image\\(s\\), with 1 map\\(s\\) each"):
            explanation.overlay(*index)
    assert np.array_equal(explanation.overlay(-1, -1), explanation.overlay())
    with pytest.raises(ImageError, match="0 x 5, expected at least one pixel"):
        classifier.region(5, 0)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", "", "cuda:x", None])
def test_a_device_that_is_not_here_is_refused(device: str) -> None:
    with pytest.raises(ModelError, match="choose auto, cpu, cuda, cuda:N or mps") as caught:
        gradcam.load_classifier(device=device)
    assert repr(device) in str(caught.value)


@pytest.mark.parametrize("precision", ["fp64", "float32", "", None, ["x"]])
def test_an_unknown_precision_is_refused(precision: Any) -> None:
    with pytest.raises(ModelError) as caught:
        gradcam.load_classifier(device="cpu", precision=precision)
    assert str(caught.value) == f"There is no precision {precision!r}: choose fp32, bf16, fp16."


@pytest.mark.parametrize(
    ("pictures", "error", "message"),
    [
        ([], ImageError, "There are no images"),
        ("missing.jpg", ImageError, "missing.jpg: does not exist"),
        (np.zeros((8, 8, 3), complex), ImageError, "expected an RGB array"),
        ([np.zeros(8, np.uint8)], ImageError, "expected an RGB array"),
        (np.zeros((8, 0, 3), np.uint8), ImageError, "expected an RGB array"),
        (np.zeros((8, 8, 5), np.uint8), ImageError, r"with 5 channel\(s\), but the model takes 3 channels"),
        (3, ImageError, "The images are 3, expected a path, .*, or a sequence"),
        (None, ImageError, "The images are None, expected a path"),
    ],
)
def test_invalid_images_are_refused(
    classifier: gradcam.Classifier, pictures: object, error: type[GradcamError], message: str
) -> None:
    with pytest.raises(error, match=message):
        classifier.explain(pictures)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": "koalla"}, TargetError, "nearest: 'koala'"),
        ({"target": [["koala", "koalla"]]}, TargetError, "nearest: 'koala'"),
        ({"target": ["koala", "espresso"]}, TargetError, r"does not fit 1 image\(s\)"),
        ({"target": "cardigan"}, TargetError, "264 .* 474"),
        ({"target": 1000}, TargetError, "0 to 999"),
        ({"target": "-1"}, TargetError, "0 to 999"),
        ({"layer": "layer5"}, LayerError, "'layer4'"),
        ({"layer": "head.2"}, LayerError, "no spatial grid"),
        ({"method": "gradcm"}, GradcamError, "'gradcam'"),
    ],
)
def test_invalid_targets_are_refused(
    classifier: gradcam.Classifier, photo: Photo, options: dict[str, object], error: type[GradcamError], message: str
) -> None:
    with pytest.raises(error, match=message):
        classifier.explain(photo("coffee.jpg"), **options)


@pytest.mark.parametrize("size", [(1, 1), (3, 2000), (2000, 3)])
def test_a_picture_of_extreme_size_is_explained(classifier: gradcam.Classifier, size: tuple[int, int]) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    explanation = classifier.explain(picture)
    overlay = explanation.overlay(base="color")
    y0, x0, rows, columns = classifier.region(*size)
    overlay[y0 : y0 + rows, x0 : x0 + columns] = picture[y0 : y0 + rows, x0 : x0 + columns]
    np.testing.assert_array_equal(overlay, picture)


@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("mps", marks=pytest.mark.mps)]
)
def test_a_gpu_explains_as_the_processor_does(classifier: gradcam.Classifier, photo: Photo, device: str) -> None:
    paths = [photo("chelsea.jpg"), photo("macaw.webp")]
    ours, expected = gradcam.load_classifier(device=device).explain(paths), classifier.explain(paths)
    assert ours.heatmaps.device.type == device
    assert ours.classes.tolist() == expected.classes.tolist()
    torch.testing.assert_close(ours.heatmaps.cpu(), expected.heatmaps, rtol=0, atol=0.02)
    assert abs(ours.overlay().astype(int) - expected.overlay()).mean() < 1


def test_rival_classes_may_be_given_as_labels(classifier: gradcam.Classifier, photo: Callable[[str], Path]) -> None:
    rivals = ("wombat", ["wombat"], 106, ["wombat", 106])
    targets = [ClassTarget("koala", score="contrast", against=against) for against in rivals]
    explanations = [classifier.explain(photo("koala.webp"), target=target) for target in targets]
    for explanation in explanations:
        assert torch.equal(explanation.maps, explanations[0].maps)
    logits = explanations[0].output[0]
    assert explanations[0].scores.item() == pytest.approx((logits[105] - logits[106]).item(), abs=1e-4)
