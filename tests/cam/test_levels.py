"""Explain layers with several tensors or several runs, levels that are added, and images without gradient."""

import itertools
import warnings
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import gradcam
from gradcam.errors import BlindLayerError, GradcamWarning, LayerError
from tests import oracles
from tests.helpers import FunctionModule

IMAGES = torch.randn(2, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mean_class_score(output: Any) -> Tensor:
    return output["out"][:, 1].mean((1, 2))


@pytest.fixture(scope="module")
def segmenter() -> nn.Module:
    torch.manual_seed(0)
    make = torchvision.models.segmentation.fcn_resnet50
    return make(weights=None, weights_backbone=None, num_classes=3, aux_loss=True).double().eval()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gradcam", "eigencam", "shapleycam", "fasterscorecam"])
@pytest.mark.parametrize("layer", ["backbone", "backbone:out"])
def test_the_tensor_of_a_dict_that_the_score_reads_is_explained(segmenter: nn.Module, layer: str, method: str) -> None:
    """Explain the tensor that the score depends on, although the backbone's dict lists the auxiliary one first."""
    images = IMAGES[:1]
    expected = gradcam.explain(segmenter, images, "backbone.layer4", method=method, target=mean_class_score)
    explanation = gradcam.explain(segmenter, images, layer, method=method, target=mean_class_score)
    assert explanation.layer == layer
    assert expected.maps.any()
    assert torch.equal(explanation.maps, expected.maps)


def test_it_is_listed_as_a_layer_with_a_map(segmenter: nn.Module) -> None:
    """Check the row of the backbone in a list whose score is the model's first output, "out"."""
    row = {row.name: row for row in gradcam.list_layers(segmenter, IMAGES)}["backbone"]
    assert row.cam
    assert row.shape == (2, 2048, 8, 8)


def test_errors_about_keys_of_a_dict(segmenter: nn.Module) -> None:
    with pytest.raises(BlindLayerError, match="does not depend on layer 'backbone:aux'"):
        gradcam.explain(segmenter, IMAGES, "backbone:aux", target=mean_class_score)
    with pytest.raises(LayerError, match="no floating-point tensor under 'in': the keys are 'aux', 'out'"):
        gradcam.explain(segmenter, IMAGES, "backbone:in", target=mean_class_score)
    with pytest.raises(LayerError, match="the output is one tensor"):
        gradcam.explain(segmenter, IMAGES, "backbone.layer4:0", target=mean_class_score)
    with pytest.raises(LayerError, match=r"no layer 'bakbone:out'.*Nearest: 'backbone'"):
        gradcam.explain(segmenter, IMAGES, "bakbone:out", target=mean_class_score)


class Pyramid(nn.Module):
    """A model with three levels that takes the maximum over levels as the score of a class, as a detector does."""

    def __init__(self, *, with_input: bool = False) -> None:
        super().__init__()
        self.levels, self.head = Levels(with_input=with_input), nn.Conv2d(6, 5, 1)
        self.scales = [1.0, 1.0, 1.0]

    def read(self, levels: list[Tensor]) -> list[Tensor]:
        maxima = [self.head(level).flatten(2).amax(2) for level in levels]
        return [scale * (item + 10) for scale, item in zip(self.scales, maxima)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.read(self.levels(x)[-3:])).amax(0)


class Levels(nn.Module):
    def __init__(self, *, with_input: bool) -> None:
        super().__init__()
        channels = (3, 6, 6, 6)
        self.stages = nn.ModuleList(nn.Conv2d(*pair, 3, stride=2, padding=1) for pair in itertools.pairwise(channels))
        self.with_input = with_input

    def forward(self, x: Tensor) -> list[Tensor]:
        levels = [x] if self.with_input else []
        for stage in self.stages:
            x = stage(x).relu()
            levels.append(x)
        return levels


def read_level(model: nn.Module, image: Tensor) -> int:
    """Return the index of the level that has the highest score of class 1."""
    with torch.no_grad():
        return int(torch.stack(model.read(model.levels(image)[-3:]))[:, 0, 1].argmax())


@pytest.fixture(params=[False, True], ids=["levels", "input and levels"])
def pyramid(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    """Return a model, and two images whose score of class 1 comes from different levels."""
    torch.manual_seed(0)
    model = Pyramid(with_input=request.param).double().eval()
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(40, 1, 3, 32, 32, dtype=torch.float64, generator=generator) * 3
    with torch.no_grad():
        usual = torch.stack([torch.stack(model.read(model.levels(image)[-3:]))[:, 0, 1] for image in images]).mean(0)
    model.scales = (1 / usual).tolist()
    image_of_level = {read_level(model, image): image for image in images}
    assert len(image_of_level) >= 2, image_of_level.keys()
    first, second, *_ = sorted(image_of_level)
    return model, torch.cat([image_of_level[first], image_of_level[second]])


def differentiate_levels(model: nn.Module, images: Tensor) -> list[list[Tensor]]:
    """Return Grad-CAM of class 1 by level and image, each image alone, by plain autograd."""
    maps: list[list[Tensor]] = [[], [], []]
    for image in images.split(1):
        with torch.no_grad():
            before = model.levels(image)
        levels = [level.detach().requires_grad_() for level in before[-3:]]
        score = torch.stack(model.read(levels))[:, 0, 1].amax()
        gradients = torch.autograd.grad(score, levels)
        for maps_of_level, level, gradient in zip(maps, levels, gradients):
            maps_of_level.append(oracles.gradcam_map(level[0].detach(), gradient[0]))
    return maps


def add_levels(maps: list[list[Tensor]], image: int) -> Tensor:
    finest = tuple(max((level[image].shape for level in maps), key=lambda shape: shape[0]))
    resized = [oracles.resize_cubic(level[image].numpy(), finest) for level in maps]
    return torch.from_numpy(sum(resized))


def find_first_level(model: nn.Module) -> int:
    """Return the index of the first level among the layer's output tensors."""
    return int(model.levels.with_input)


def test_the_levels_of_a_pyramid_are_added(pyramid: tuple[nn.Module, Tensor]) -> None:
    model, images = pyramid
    maps = differentiate_levels(model, images)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explanation = gradcam.explain(model, images, "levels", target=1)
    for image in range(2):
        assert explanation.maps[image].any()
        torch.testing.assert_close(explanation.maps[image, 0].double(), add_levels(maps, image), rtol=1e-4, atol=1e-7)


def test_named_levels_are_added_on_request(pyramid: tuple[nn.Module, Tensor]) -> None:
    model, images = pyramid
    maps = differentiate_levels(model, images)
    layers = [f"levels:{find_first_level(model) + level}" for level in range(3)]
    explanation = gradcam.explain(model, images, layers=layers, join="sum", target=1)
    assert explanation.layer == " + ".join(layers)
    for image in range(2):
        torch.testing.assert_close(explanation.maps[image, 0].double(), add_levels(maps, image), rtol=1e-4, atol=1e-7)
    compared = gradcam.compare(model, images, layers=layers, methods=["gradcam", "hirescam"], join="sum", target=1)
    assert list(compared) == [(explanation.layer, "gradcam"), (explanation.layer, "hirescam")]
    assert torch.equal(compared[explanation.layer, "gradcam"].maps, explanation.maps)
    signed = gradcam.explain(model, images, layers=layers, join="sum", target=1, evidence="signed")
    negative = gradcam.explain(model, images, layers=layers, join="sum", target=1, evidence="negative")
    assert (signed.maps < 0).any()
    torch.testing.assert_close(signed.maps, explanation.maps - negative.maps, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("method", ["gradcam", "eigencam"])
def test_a_pyramid_beside_one_of_its_levels(pyramid: tuple[nn.Module, Tensor], method: str) -> None:
    model, images = pyramid
    level = f"levels:{find_first_level(model) + read_level(model, images[:1])}"
    alone = gradcam.explain(model, images, "levels", method=method, target=1)
    explanations = gradcam.compare(model, images[:1], layers=["levels", level], methods=[method], target=1)
    assert explanations["levels", method].maps.shape == alone.maps[:1].shape
    first = gradcam.explain(model, images[:1], "levels", method=method, target=1)
    assert torch.equal(explanations["levels", method].maps, first.maps)
    joined = gradcam.explain(model, images, layers=["levels", level], join="sum", method=method, target=1)
    # The layer's output contains the level again, but each level counts once.
    assert torch.equal(joined.maps, alone.maps)


@pytest.mark.parametrize("method", ["gradcam", "shapleycam"])
def test_an_image_without_gradient_is_blank_with_a_warning(pyramid: tuple[nn.Module, Tensor], method: str) -> None:
    model, images = pyramid
    level = find_first_level(model) + read_level(model, images[:1])
    with pytest.warns(GradcamWarning, match=f"'levels:{level}' is exactly zero for some of the images"):
        explanation = gradcam.explain(model, images, f"levels:{level}", method=method, target=1, evidence="signed")
    assert explanation.maps[0].any()
    assert not explanation.maps[1].any()
    with pytest.raises(BlindLayerError, match=f"levels:{level}"):
        gradcam.explain(model, images[1:], f"levels:{level}", method=method, target=1)


class Gated(nn.Module):
    """A model in which the first layer counts only for bright images, and the second for all images."""

    def __init__(self) -> None:
        super().__init__()
        self.bright, self.all, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        gate = (x.mean((1, 2, 3)) > 0).to(x)[:, None, None, None]
        return self.head((gate * self.bright(x) + self.all(x)).mean((2, 3)))


@pytest.mark.filterwarnings("ignore:.*have both signs")
@pytest.mark.parametrize("method", ["gradcam", "shapleycam", "ablationcam", "reciprocam", "finercam"])
def test_every_method_that_reads_the_score_reports_blank_images(method: str) -> None:
    model, images = Gated().double().eval(), torch.stack([IMAGES[0] + 1, IMAGES[1] - 1])[..., :16, :16]
    with pytest.warns(GradcamWarning, match="'bright' is exactly zero for some of the images"):
        some = gradcam.explain(model, images, "bright", method=method, target=1, evidence="signed")
    assert [bool(item.any()) for item in some.maps] == [True, False]
    with pytest.warns(GradcamWarning, match=r"'bright' is exactly zero: its heatmaps are blank"):
        pair = gradcam.compare(
            model, images[1:], layers=("bright", "all"), methods=[method], target=1, evidence="signed"
        )
    assert [bool(item.maps.any()) for item in pair.values()] == [False, True]
    with pytest.raises(BlindLayerError, match="'bright'"):
        gradcam.explain(model, images[1:], "bright", method=method, target=1)


def test_a_layer_without_a_path_to_the_score_is_blank_beside_others() -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        module.unused(x)
        return module.head(module.used(x).mean((2, 3)))

    parts = {"used": nn.Conv2d(3, 4, 3), "unused": nn.Conv2d(3, 4, 3), "head": nn.Linear(4, 5)}
    model = FunctionModule(forward, **parts).double().eval()
    with pytest.warns(GradcamWarning, match="'unused'"):
        explanations = gradcam.compare(model, IMAGES, layers=["used", "unused"], methods=["gradcam"], target=1)
    assert torch.equal(explanations["used", "gradcam"].maps, gradcam.explain(model, IMAGES, "used", target=1).maps)
    assert not explanations["unused", "gradcam"].maps.any()
    with pytest.raises(BlindLayerError, match="does not depend on layer 'unused'"):
        gradcam.explain(model, IMAGES, "unused", target=1)


class Repeats(nn.Module):
    """A model that runs one block three times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(3, 4, 3, stride=4), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = x + self.block(x).tanh()
        return self.head(x.mean((2, 3)))


def run_from(model: nn.Module, run: int, x: Tensor, output: Tensor) -> Tensor:
    """Return the logits if run number `run` of the block, on input `x`, had returned `output`."""
    x = x + output.tanh()
    for _ in range(2 - run):
        x = x + model.block(x).tanh()
    return model.head(x.mean((2, 3)))


@pytest.mark.filterwarnings("ignore:.*have both signs")
@pytest.mark.parametrize("run", [0, 1, 2])
def test_one_run_of_a_layer_that_runs_several_times(run: int) -> None:
    torch.manual_seed(0)
    model = Repeats().double().eval()
    images = IMAGES[:1, :, :32, :32]
    with torch.no_grad():
        x = model.stem(images)
        for _ in range(run):
            x = x + model.block(x).tanh()
        activations = model.block(x)
    output = activations.clone().requires_grad_()
    (gradients,) = torch.autograd.grad(run_from(model, run, x, output)[:, 1].sum(), output)
    expected = oracles.gradcam_map(activations[0], gradients[0])
    for _ in range(2):
        explanation = gradcam.explain(model, images, f"block#{run}", target=1)
        torch.testing.assert_close(explanation.maps[0, 0].double(), expected, rtol=1e-5, atol=1e-9)
    plain = model(images)[0, 1].detach()
    weights = []
    with torch.no_grad():
        for channel in range(4):
            without = activations.clone()
            without[:, channel] = 0
            weights.append((plain - run_from(model, run, x, without)[0, 1]) / plain.abs())
    ablated = gradcam.explain(model, images, f"block#{run}", method="ablationcam", target=1, evidence="signed")
    expected = torch.einsum("c,chw->hw", torch.stack(weights), activations[0])
    torch.testing.assert_close(ablated.maps[0, 0].double(), expected, rtol=1e-4, atol=1e-7)


def test_several_runs_in_one_comparison_and_missing_runs() -> None:
    torch.manual_seed(0)
    model = Repeats().double().eval()
    layers = ["block#0", "block#2", "stem"]
    explanations = gradcam.compare(model, IMAGES, layers=layers, methods=["gradcam"], target=1)
    for layer in layers:
        alone = gradcam.explain(model, IMAGES, layer, target=1)
        torch.testing.assert_close(explanations[layer, "gradcam"].maps, alone.maps)
    with pytest.raises(LayerError, match=r"ran 3 times.*name one of its runs, 'block#0' to '#2'"):
        gradcam.explain(model, IMAGES, "block", target=1)
    with pytest.raises(LayerError, match=r"'block#3' ran 3 time\(s\): runs are counted from 0"):
        gradcam.explain(model, IMAGES, "block#3", target=1)
    with pytest.raises(LayerError, match="names one tensor or one run of a layer"):
        gradcam.inspection.record(model, "block#1")


def test_the_hidden_state_of_a_recurrent_layer_is_no_level() -> None:
    """Use the sequence as tokens, and ignore the hidden state, which has no grid."""

    def forward(module: Any, x: Tensor) -> Tensor:
        tokens, state = module.memory(module.patches(x).flatten(2).mT)
        return module.head(tokens.mean(1) + state[0])

    parts = {"patches": nn.Conv2d(3, 8, 8, stride=8), "memory": nn.GRU(8, 6, batch_first=True), "head": nn.Linear(6, 5)}
    model = FunctionModule(forward, **parts).double().eval()
    explanation = gradcam.explain(model, IMAGES, "memory", target=1)
    assert explanation.maps.shape == (2, 1, 8, 8)
    assert torch.equal(explanation.maps, gradcam.explain(model, IMAGES, "memory:0", target=1).maps)


@pytest.mark.parametrize(
    "options", [{"join": "mean"}, {"join": 3}, {"layers": ["levels:0"]}, {"layers": [], "join": "sum"}]
)
def test_wrong_joins_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(LayerError, match="join is|one heatmap|expected a list"):
        gradcam.explain(Pyramid().double(), IMAGES, target=1, **options)


def test_the_image_in_hidden_states_is_the_last_one() -> None:
    """Use the first tensor of a Hugging Face output, the last hidden state, and ignore all its others."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, image_size=64, patch_size=16,
        output_hidden_states=True,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).double().eval()
    images = IMAGES[:1]

    def mean_of_patches(output: Any) -> Tensor:
        return F.softplus(output.hidden_states[-1])[:, 1:, 2].mean(1)

    explanation = gradcam.explain(
        model, images, "vit.layers.1" if hasattr(model.vit, "layers") else "vit.encoder.layer.1", target=mean_of_patches
    )
    assert explanation.maps.any()
