"""Check test-time augmentation and eigen-smoothing, which are options of every method."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.cam.methods.table import METHODS
from gradcam.errors import GradcamError, TargetError
from gradcam.targets import ClassTarget
from tests.helpers import TINY, FunctionModule, assert_same, tiny_model, traces

ONE_PASS = [name for name, method in METHODS.items() if method.needs]
VIEWS = {
    "flip": [(1, False), (1, True)],
    "flip-scale": [(1, False), (0.9, False), (1.1, False), (1, True), (0.9, True), (1.1, True)],
}


def slow_mean(model: nn.Module, images: Tensor, layer: str, views: list[tuple[float, bool]], **options: Any) -> Tensor:
    """Return the mean of the maps of all views, each explained on its own and mirrored back."""
    total = 0.0
    for factor, mirrored in views:
        view = images.flip(-1) if mirrored else images
        maps = gradcam.explain(model, view * factor, layer, evidence="signed", **options).maps
        total = total + (maps.flip(-1) if mirrored else maps)
    return total / len(views)


@pytest.mark.parametrize("augmentation", VIEWS)
@pytest.mark.parametrize("method", [name for name in ONE_PASS if METHODS[name].is_signed and not METHODS[name].score])
def test_the_map_is_the_mean_of_all_views_put_upright(augmentation: str, method: str) -> None:
    model = tiny_model().eval()
    target = [[1, 2], [0, 4], [3, 2]]
    options: Any = {"method": method, "target": target}
    explanation = gradcam.explain(model, TINY, "3", augmentation=augmentation, evidence="signed", **options)
    expected = slow_mean(model, TINY, "3", VIEWS[augmentation], **options)
    torch.testing.assert_close(explanation.maps, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(explanation.maps, gradcam.explain(model, TINY, "3", evidence="signed", **options).maps)


@pytest.mark.parametrize("method", ONE_PASS)
def test_every_method_can_be_augmented_in_one_batch_and_smoothed(method: str) -> None:
    model = tiny_model().eval()
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    explanation = gradcam.explain(model, TINY, "3", method=method, augmentation="flip-scale")
    assert sizes == [18] + [1] * 18  # the first call also runs each image alone
    assert explanation.maps.shape == (3, 1, 6, 8)
    assert explanation.heatmaps.shape == (3, 1, 12, 16)
    smoothed = gradcam.explain(model, TINY, "0", method=method, smoothing="eigen", augmentation="flip")
    assert smoothed.heatmaps.isfinite().all()
    assert smoothed.method == method


def test_classes_scores_and_output_are_those_of_the_images() -> None:
    model = tiny_model().eval()
    plain = gradcam.explain(model, TINY, "3")
    explanation = gradcam.explain(model, TINY, "3", augmentation="flip-scale")
    assert torch.equal(explanation.classes, plain.classes)  # type: ignore[arg-type]
    torch.testing.assert_close(explanation.scores, plain.scores)
    torch.testing.assert_close(explanation.output, plain.output)


def test_views_are_explained_for_the_class_of_the_image_itself() -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        """Return the brightness of the left half and of the right half."""
        x = module.keep(x)
        return torch.stack([x[..., :2].mean((1, 2, 3)), x[..., 2:].mean((1, 2, 3))], 1)

    images, model = torch.zeros(1, 1, 4, 4), FunctionModule(forward, keep=nn.Identity())
    images[..., 0] = 1
    explanation = gradcam.explain(model, images, "keep", method="hirescam", augmentation="flip", evidence="signed")
    assert explanation.classes.tolist() == [[0]]
    # In the mirrored view, class 0 gets no evidence.
    torch.testing.assert_close(explanation.maps[0, 0, :, 0], torch.full((4,), 1 / 16))


@pytest.mark.parametrize("target", [lambda output: output[:, :2] - output[:, 2:4], [0, 1, 2], 3])
def test_targets_of_all_forms(target: Any) -> None:
    model = tiny_model().eval()
    explanation = gradcam.explain(model, TINY, "0", target=target, augmentation="flip", evidence="signed")
    expected = slow_mean(model, TINY, "0", VIEWS["flip"], target=target)
    torch.testing.assert_close(explanation.maps, expected, rtol=1e-4, atol=1e-6)


def test_inputs_per_image_are_repeated() -> None:
    def forward(module: Any, image: Tensor, scale: Tensor, offset: Tensor) -> dict[str, Tensor]:
        features = module.conv(image).relu() * scale[:, None, None, None] + offset
        return {"logits": features.mean((2, 3)), "other": offset}

    model = FunctionModule(forward, conv=nn.Conv2d(3, 4, 3))
    images = {"image": TINY, "scale": torch.tensor([1.0, 2.0, 3.0]), "offset": torch.tensor(0.5)}
    explanation = gradcam.explain(model, images, "conv", target=1, augmentation="flip", evidence="signed")
    for row in range(3):
        alone = {key: value[row : row + 1] if value.ndim else value for key, value in images.items()}
        single = gradcam.explain(model, alone, "conv", target=1, augmentation="flip", evidence="signed")
        torch.testing.assert_close(explanation.maps[row], single.maps[0])
    assert explanation.output["logits"].shape == (3, 4)
    assert explanation.output["other"].shape == ()


def test_masks_are_mirrored_with_their_images() -> None:
    def forward(module: Any, image: Tensor, mask: Tensor) -> Tensor:
        return (module.conv(image * mask).relu() ** 2).mean((2, 3))

    model, mask = FunctionModule(forward, conv=nn.Conv2d(3, 4, 3)), (torch.rand(3, 1, 12, 16) > 0.5).float()
    explanation = gradcam.explain(model, (TINY, mask), "conv", target=1, augmentation="flip")
    expected = gradcam.explain(model, (TINY * mask, torch.ones_like(mask)), "conv", target=1, augmentation="flip")
    torch.testing.assert_close(explanation.maps, expected.maps)


def test_one_target_number_applies_to_all_views() -> None:
    model = FunctionModule(lambda module, x, temperature: module.model(x) / temperature, model=tiny_model())
    explanation = gradcam.explain(model, (TINY[:1], torch.tensor([2.0])), "model.3", target=1, augmentation="flip")
    plain = gradcam.explain(model.model, TINY[:1], "3", target=1, augmentation="flip")
    torch.testing.assert_close(explanation.maps * 2, plain.maps)


def test_outputs_with_logits_of_any_kind() -> None:
    model = FunctionModule(lambda module, x: SimpleNamespace(logits=module.model(x)), model=tiny_model())
    explanation = gradcam.explain(model, TINY, "model.3", target=1, augmentation="flip")
    plain = gradcam.explain(model.model, TINY, "3", target=1, augmentation="flip")
    torch.testing.assert_close(explanation.maps, plain.maps)
    with pytest.raises(TargetError, match="SimpleNamespace, has no tensor with 6 rows"):
        gradcam.explain(model, TINY, "model.3", target=lambda output: output.logits[:, 1], augmentation="flip")


def test_rivals_are_those_of_the_image_itself_in_all_views() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(12)).eval()
    logits, mirrored = model(TINY), model(TINY.flip(-1))
    classes = logits.argmax(1)

    def rivals(values: Tensor, image: int) -> list[int]:
        order = values[image].argsort(descending=True).tolist()
        return [index for index in order if index != classes[image]][:5]

    assert any(set(rivals(logits, image)) != set(rivals(mirrored, image)) for image in range(3))

    def contrast(output: Tensor) -> Tensor:
        return torch.stack([row[classes[i]] - row[rivals(logits, i)].mean() for i, row in enumerate(output)])

    actual, expected = (
        gradcam.explain(model, TINY, "0", target=target, augmentation="flip", evidence="signed").maps
        for target in (ClassTarget(score="contrast"), contrast)
    )
    torch.testing.assert_close(actual, expected)


def test_the_input_and_the_model_are_left_alone() -> None:
    model, images = tiny_model(), TINY.clone()
    before = traces(model)
    gradcam.explain(model, images, "3", augmentation="flip-scale", smoothing="eigen")
    assert_same(before, traces(model))
    assert torch.equal(images, TINY)


def test_a_photograph_and_its_mirror_image_agree(classifier: gradcam.Classifier, photo: Callable[[str], Path]) -> None:
    image = gradcam.read_image(photo("koala.webp"))
    heatmaps = classifier.explain(image, augmentation="flip").heatmaps
    mirrored = classifier.explain(np.ascontiguousarray(image[:, ::-1]), augmentation="flip").heatmaps
    assert (heatmaps - mirrored.flip(-1)).abs().max() < 0.05
    plain = (classifier.explain(image).heatmaps, classifier.explain(image[:, ::-1].copy()).heatmaps)
    assert (plain[0] - plain[1].flip(-1)).abs().max() > 0.05


# Eigen-smoothing


def slow_component(activations: Tensor, weights: Tensor) -> np.ndarray:
    """Return the first principal component of the weighted channels of one image and class, by NumPy's SVD."""
    matrix = np.stack([(weights[c] * activations[c]).flatten().numpy() for c in range(len(activations))], axis=1)
    vectors, values, _ = np.linalg.svd(matrix, full_matrices=False)
    component = vectors[:, 0] * values[0]
    sign = -1 if component @ matrix.sum(1) < 0 else 1
    return (sign * component).reshape(activations.shape[1:])


@pytest.mark.parametrize(
    ("name", "weigh"),
    [
        ("gradcam", lambda a, g: g.mean((1, 2), keepdim=True)),
        ("finercam", lambda a, g: g.mean((1, 2), keepdim=True)),
        ("xgradcam", lambda a, g: ((a * g).sum((1, 2)) / a.sum((1, 2)))[:, None, None]),
        ("hirescam", lambda a, g: g),
        ("layercam", lambda a, g: g.relu()),
        ("elementwise-gradcam", lambda a, g: g * (a * g > 0)),
    ],
)
def test_smoothing_takes_the_first_component_of_channels(name: str, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
    activations = torch.randn(2, 5, 4, 6, dtype=torch.float64)
    gradients = torch.randn(2, 3, 5, 4, 6, dtype=torch.float64)
    maps = METHODS[name].smoothed().compute(activations, gradients)
    for image, k in np.ndindex(2, 3):
        expected = slow_component(activations[image], weigh(activations[image], gradients[image, k]))
        np.testing.assert_allclose(maps[image, k].numpy(), expected, rtol=1e-7, atol=1e-9)


def test_smoothed_hirescam_is_eigengradcam_and_components_stay() -> None:
    methods = ["eigengradcam", "eigencam", "kpcacam"]
    plain = gradcam.compare(tiny_model(), TINY, layers=["0"], methods=methods)
    smoothed = gradcam.compare(tiny_model(), TINY, layers=["0"], methods=["hirescam", *methods], smoothing="eigen")
    assert torch.equal(smoothed["0", "hirescam"].maps, smoothed["0", "eigengradcam"].maps)
    assert all(torch.equal(smoothed[key].maps, item.maps) for key, item in plain.items())


def test_smoothed_fem() -> None:
    activations = torch.zeros(1, 2, 4, 4, dtype=torch.float64)
    activations[0, 0, 1, 1], activations[0, 1, 1, 1], activations[0, 1, 3, 3] = 16, 48, 0.1
    smoothed = METHODS["fem"].smoothed().compute(activations)[0]
    matrix = np.zeros((16, 2))
    matrix[5] = [1, 48.1 / 16]
    np.testing.assert_allclose(smoothed.flatten().numpy(), np.linalg.norm(matrix, axis=1), atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augmentation": "rotate"}, "augmentation is 'rotate', expected one of 'none', 'flip', 'flip-scale'"),
        ({"augmentation": True}, "augmentation is True"),
        ({"smoothing": "gauss"}, "smoothing is 'gauss', expected one of 'none', 'eigen'"),
        ({"smoothing": None}, "smoothing is None"),
    ],
)
def test_unknown_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GradcamError, match=message):
        gradcam.explain(tiny_model(), TINY, "3", **options)
