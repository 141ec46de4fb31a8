"""Test that the caller's default dtype and default device of PyTorch do not change any result."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam import evaluation
from gradcam.attributions import ATTRIBUTIONS
from gradcam.cam.methods.table import METHODS
from gradcam.evaluation.heatmap_sources import CONTROLS
from gradcam.models.preprocess import Preprocessing

SOURCES = sorted(Path(gradcam.__file__).parent.rglob("*.py"))
FACTORIES = {"arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand"}
FACTORIES |= {"randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"}
IMAGES = torch.rand(2, 3, 24, 32, generator=torch.Generator("cpu").manual_seed(0))


def test_every_tensor_names_its_dtype_and_its_device() -> None:
    anonymous = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _name(node) in FACTORIES:
                missing = {"dtype", "device"} - {keyword.arg for keyword in node.keywords}
                anonymous += [
                    f"{path.name}:{node.lineno}: torch.{_name(node)} without {name}" for name in sorted(missing)
                ]
            if isinstance(node, ast.Call) and _name(node) == "Generator" and not (node.args or node.keywords):
                anonymous.append(f"{path.name}:{node.lineno}: torch.Generator without a device")
    assert not anonymous


def _name(call: ast.Call) -> str:
    function = call.func
    is_of_torch = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    return function.attr if is_of_torch and function.value.id == "torch" else ""


@pytest.fixture(params=["float64", "bfloat16", "meta"])
def other_defaults(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any]], Any]:
    """Return a runner that calls a function under other PyTorch defaults.

    On "meta", a tensor made without a device has no values.
    """

    def run(function: Callable[[], Any]) -> Any:
        try:
            if request.param == "meta":
                torch.set_default_device("meta")
            else:
                torch.set_default_dtype(getattr(torch, request.param))
            return function()
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)

    return run


def make_model() -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        body = [nn.Conv2d(3, 8, 3, 2, 1), nn.GELU(), nn.Conv2d(8, 6, 3, 1, 1), nn.GELU()]
        return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)).eval()


MODEL = make_model()
REDUCED_OPTIONS = {"masks": 6, "samples": 2, "steps": 2}


def reduce_cost(name: str) -> gradcam.Method:
    method = METHODS[name]
    return method.using(**{option: REDUCED_OPTIONS[option] for option in method.options if option in REDUCED_OPTIONS})


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.place in ("layer", "input")])
def test_methods(name: str, other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    def explain() -> tuple[Tensor, Tensor]:
        explanation = gradcam.explain(MODEL, IMAGES, "3", method=reduce_cost(name), target=[[0, 1], [2, 3]])
        return explanation.maps, explanation.heatmaps

    assert_same(explain, other_defaults)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.place == "attention"])
def test_methods_of_attention(name: str, other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5).eval()
    nn.init.normal_(model.heads.head.weight)
    images = torch.nn.functional.interpolate(IMAGES, size=(32, 32))
    assert_same(lambda: [gradcam.explain(model, images, target=1, method=name).maps], other_defaults)


@pytest.mark.parametrize("options", [{"augmentation": "flip-scale"}, {"smoothing": "eigen"}, {"evidence": "signed"}])
def test_options(options: dict[str, str], other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    assert_same(lambda: [gradcam.explain(MODEL, IMAGES, **options).heatmaps], other_defaults)


@pytest.mark.filterwarnings("ignore:.*may be misplaced")
def test_reshape(other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    assert_same(
        lambda: [gradcam.explain(MODEL, IMAGES, "3", reshape=lambda activations: activations.flip(2)).maps],
        other_defaults,
    )


@pytest.mark.parametrize("score", ["logit", "probability", "contrast"])
def test_scores(score: str, other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    from gradcam.targets import ClassTarget

    assert_same(lambda: [gradcam.explain(MODEL, IMAGES, target=ClassTarget(1, score=score)).maps], other_defaults)


@pytest.mark.parametrize("name", list(ATTRIBUTIONS))
def test_attributions(name: str, other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    model = nn.Sequential(*[nn.ReLU() if isinstance(layer, nn.GELU) else layer for layer in MODEL])
    method, options = ATTRIBUTIONS[name], {"layer": "3"} if ATTRIBUTIONS[name].has_layer else {}
    assert_same(lambda: [method.function(model, IMAGES, target=1, **options).values], other_defaults)


@pytest.mark.parametrize("name", list(CONTROLS))
def test_controls(name: str, other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    assert_same(lambda: [CONTROLS[name].make(IMAGES, seed=3)], other_defaults)


OF_HEATMAPS = ["deletion", "insertion", "road", "sufficiency", "confidence_change"]
OF_EXPLAIN = ["max_sensitivity", "randomisation", "class_difference"]


@pytest.mark.parametrize("name", [*OF_HEATMAPS, *OF_EXPLAIN])
def test_metrics(name: str, other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    heatmaps = gradcam.explain(MODEL, IMAGES, "3", target=1, method="layercam").heatmaps[:, 0]

    def explain(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
        return gradcam.explain(model, images, "3", target=classes[:, None], method="layercam").heatmaps[:, 0]

    def measure() -> list[Tensor]:
        subject = evaluation.Subject(MODEL, IMAGES, 1)
        return list(list_tensors(getattr(evaluation, name)(subject, explain if name in OF_EXPLAIN else heatmaps)))

    assert_same(measure, other_defaults)


def list_tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif hasattr(result, "__dataclass_fields__"):
        for name in result.__dataclass_fields__:
            yield from list_tensors(getattr(result, name))


@pytest.mark.parametrize("kind", ["uint8", "uint16", "float32"])
def test_preprocessing(kind: str, other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    picture = (np.random.default_rng(0).random((30, 40, 3)) * (1 if kind == "float32" else 255)).astype(kind)
    preprocess = Preprocessing(size=(24, 24), resize=28, mean=(0.1, 0.2, 0.3), std=(0.7, 0.8, 0.9))
    assert_same(lambda: [preprocess(picture)], other_defaults)


def test_imputation(other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    is_known = torch.rand(2, 24, 32, generator=torch.Generator("cpu").manual_seed(1)) < 0.6
    assert_same(lambda: [evaluation.impute(IMAGES, is_known)], other_defaults)


def test_summaries(other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    maps = IMAGES[:, 0]
    masks = maps > 0.5
    boxes = [[(1, 2, 20, 15)], [(3, 3, 9, 9)]]

    def measure() -> list[Tensor]:
        scores = [evaluation.complexity(maps), evaluation.adcc([0.1, 0.2], [0.3, 0.4], [0.5, 0.6])]
        scores += [evaluation.pointing_game(maps, masks), evaluation.energy_pointing_game(maps, masks)]
        return [*scores, *list_tensors(evaluation.localisation(maps, boxes))]

    assert_same(measure, other_defaults)


def test_the_check_and_a_classifier(other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    picture = (np.random.default_rng(0).random((30, 40, 3)) * 255).astype(np.uint8)

    def judge() -> list[Tensor]:
        classifier = gradcam.load_classifier(MODEL, layer="3", size=(24, 32), device="auto", activation="softmax")
        explanation = classifier.explain(picture, target=1)
        verdict = evaluation.check(classifier, picture, target=1, seed=1)
        return [
            explanation.maps,
            torch.tensor([test.value for test in verdict.tests], dtype=torch.float64, device="cpu"),
        ]

    assert_same(judge, other_defaults)


def test_the_embedded_classifier(other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    picture = (np.random.default_rng(0).random((230, 240, 3)) * 255).astype(np.uint8)
    assert_same(lambda: [gradcam.load_classifier(device="cpu").explain(picture, target=1).maps], other_defaults)


def test_models_that_are_built_here(tmp_path: Path, other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    """Weights load exactly: none is rounded on its way into a model built under another default dtype."""
    from torchvision import models

    torch.manual_seed(0)
    torch.save(models.squeezenet1_1().state_dict(), tmp_path / "weights.pth")
    picture = (np.random.default_rng(0).random((230, 240, 3)) * 255).astype(np.uint8)

    def explain() -> list[Tensor]:
        classifier = gradcam.load_classifier("squeezenet1_1", weights=tmp_path / "weights.pth", device="cpu")
        assert {parameter.dtype for parameter in classifier.model.parameters()} == {torch.float32}
        return [classifier.explain(picture, target=1).maps]

    assert_same(explain, other_defaults)


def test_skeletons(other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    from gradcam.models.skeletons import build_with_random_weights, survey

    rows = survey("squeezenet1_1").rows
    assert other_defaults(lambda: survey("squeezenet1_1").rows) == rows
    model = other_defaults(lambda: build_with_random_weights("squeezenet1_1").model)
    assert {(parameter.dtype, parameter.device.type) for parameter in model.parameters()} == {(torch.float32, "cpu")}


def test_the_callers_defaults_stay(other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    def load() -> tuple[torch.dtype, torch.device]:
        before = torch.get_default_dtype(), torch.empty(0).device
        gradcam.load_classifier(device="cpu")
        assert (torch.get_default_dtype(), torch.empty(0).device) == before
        return before

    assert other_defaults(load) != (torch.float32, torch.device("cpu"))


def test_layers(other_defaults: Callable[[Callable[[], Any]], Any]) -> None:
    rows = gradcam.list_layers(MODEL, (24, 32))
    assert other_defaults(lambda: gradcam.list_layers(MODEL, (24, 32))) == rows


def assert_same(compute: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]) -> None:
    expected, actual = compute(), run(compute)
    assert len(expected) == len(actual) > 0
    for expected_tensor, actual_tensor in zip(expected, actual):
        assert actual_tensor.device.type == "cpu"
        assert torch.equal(expected_tensor, actual_tensor)
        assert expected_tensor.dtype == actual_tensor.dtype
    assert any(tensor.any() for tensor in expected)
