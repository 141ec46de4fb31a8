"""Compare explain() and compare() with captum and a slow loop, for every form of target and kind of model."""

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import captum.attr
import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

import gradcam
from gradcam.errors import GradcamError, ImageError, LayerError, ModelError, TargetError
from gradcam.hooks import containers
from gradcam.targets import ClassTarget
from tests import oracles
from tests.helpers import TINY, Compiled, FunctionModule, assert_same, tiny_model, traces

LAYERS = [
    ("resnet18", "layer4"), ("resnet18", "layer2.0.conv1"), ("resnet18", "conv1"), ("resnet18", "layer3.1.bn2"),
    ("vgg11", "features.18"), ("vgg11", "features.19"), ("densenet121", "features"),
    ("densenet121", "features.denseblock3.denselayer2.norm1"), ("mobilenet_v2", "features.17.conv.0.1"),
    ("squeezenet1_1", "features.12.expand3x3"),
]  # fmt: skip
_models: dict[str, nn.Module] = {}


def model_called(name: str) -> nn.Module:
    if name not in _models:
        torch.manual_seed(0)
        _models[name] = torchvision.models.get_model(name, weights=None, num_classes=7).double().eval()
    return _models[name]


def images_for(count: int = 2, size: int = 64) -> Tensor:
    return torch.randn(count, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def slow_maps(model: nn.Module, images: Tensor, name: str, classes: list[int]) -> Tensor:
    """Return float64 maps (N,1,h,w) by the paper's loop, with autograd on a copy of the model."""
    model, images = model.double(), images.double()
    rows = []
    for image, index in zip(images, classes):
        pair = oracles.reference(model, image[None], [name], lambda output, index=index: output[:, index].sum())[name]
        rows.append(oracles.gradcam_map(pair[0][0], pair[1][0]))
    return torch.stack(rows)[:, None]


def test_one_map_needs_one_layer_or_a_way_to_join() -> None:
    model = tiny_model()
    for options in ({"layers": ["0", "1"]}, {"layer": "0", "layers": ["0", "1"], "join": "sum"}):
        with pytest.raises(LayerError, match="one heatmap per class: pass one layer, or layers="):
            gradcam.explain(model, TINY, target=0, **options)
    assert gradcam.explain(model, TINY, target=0, layers=["0", "1"], join="sum").maps.shape[1] == 1


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_raw_maps_equal_captum_in_float64(name: str, layer: str) -> None:
    model, images = model_called(name), images_for()
    explanation = gradcam.explain(model, images, layer, target=[2, 5])
    peer = captum.attr.LayerGradCam(model, model.get_submodule(layer))
    expected = peer.attribute(images, target=[2, 5], relu_attributions=True)
    assert expected.max() > 0
    torch.testing.assert_close(explanation.maps.double(), expected, rtol=1e-6, atol=1e-9 * expected.max().item())


def test_maps_and_heatmaps_equal_the_slow_loop() -> None:
    model = tiny_model().eval()
    explanation = gradcam.explain(model, TINY, "3", target=[0, 3, 3])
    expected = slow_maps(tiny_model().eval(), TINY, "3", [0, 3, 3])
    assert (expected.flatten(1).amax(1) > 0).any()
    torch.testing.assert_close(explanation.maps.double(), expected, rtol=1e-4, atol=1e-7)
    for heatmap, single in zip(explanation.heatmaps[:, 0], expected[:, 0]):
        large = oracles.resize_cubic(single.numpy(), (12, 16))
        large = large / large.max() if large.max() > 0 else large
        np.testing.assert_allclose(heatmap.numpy(), large, atol=1e-4)


class TestTargets:
    """Check that each form of `target` gives the same maps as one explanation per class."""

    model = tiny_model().eval()

    def single(self, image: int, index: int) -> Tensor:
        return gradcam.explain(self.model, TINY[image : image + 1], "3", target=index).maps[0, 0]

    @pytest.mark.parametrize(
        ("target", "expected"),
        [
            (2, [[2], [2], [2]]), (np.int64(2), [[2], [2], [2]]), (torch.tensor(2), [[2], [2], [2]]),
            ([0, 1, 4], [[0], [1], [4]]), ((0, 1, 4), [[0], [1], [4]]), (np.array([0, 1, 4]), [[0], [1], [4]]),
            (torch.tensor([0, 1, 4]), [[0], [1], [4]]), ([torch.tensor(0), np.int32(1), 4], [[0], [1], [4]]),
            ([[0, 3], [1, 1], [4, 2]], [[0, 3], [1, 1], [4, 2]]),
            (torch.tensor([[0, 3], [1, 1], [4, 2]]), [[0, 3], [1, 1], [4, 2]]),
            ([np.array([0, 3]), (1, 1), torch.tensor([4, 2])], [[0, 3], [1, 1], [4, 2]]),
            (ClassTarget([0, 1, 4]), [[0], [1], [4]]),
        ],
    )  # fmt: skip
    def test_indices(self, target: Any, expected: list[list[int]]) -> None:
        explanation = gradcam.explain(self.model, TINY, "3", target=target)
        assert explanation.classes.dtype == torch.int64
        assert explanation.classes.tolist() == expected
        output = self.model(TINY)
        for image, row in enumerate(expected):
            for k, index in enumerate(row):
                torch.testing.assert_close(explanation.maps[image, k], self.single(image, index), rtol=1e-4, atol=1e-6)
                torch.testing.assert_close(explanation.scores[image, k], output[image, index])

    @pytest.mark.parametrize(("target", "count"), [(None, 1), (ClassTarget(top=3), 3)])
    def test_the_top_classes(self, target: Any, count: int) -> None:
        explanation = gradcam.explain(self.model, TINY, "3", target=target)
        assert explanation.classes.tolist() == self.model(TINY).topk(count).indices.tolist()

    def test_callables(self) -> None:
        explanation = gradcam.explain(self.model, TINY, "3", target=lambda output: output[:, 1] - output[:, 2])
        many = gradcam.explain(self.model, TINY, "3", target=lambda output: output[:, [1, 2]])
        assert explanation.classes is None
        assert explanation.maps.shape[:2] == (3, 1)
        torch.testing.assert_close(many.maps[1, 1], self.single(1, 2), rtol=1e-4, atol=1e-6)
        output = self.model(TINY)
        torch.testing.assert_close(explanation.scores[:, 0], output[:, 1] - output[:, 2])

    @pytest.mark.parametrize("shape", [(3,), (3, 1)])
    def test_a_single_logit_is_explained_itself(self, shape: tuple[int, ...]) -> None:
        model = FunctionModule(lambda module, images: module.model(images)[:, 2].reshape(shape), model=self.model)
        explanation = gradcam.explain(model, TINY, "model.3")
        expected = gradcam.explain(self.model, TINY, "3", target=2)
        torch.testing.assert_close(explanation.maps, expected.maps)
        assert explanation.classes.tolist() == [[1], [1], [1]]

    @pytest.mark.parametrize(
        "target",
        [
            True, 1.0, -1, 5, "cat", [0, 1], [0, 1, 2, 3], [True, False, True],
            [[np.array(True)], [np.array(1)], [np.array(1)]], [0.0, 1.0, 2.0], [[0, 1], [2], [3]], [[]] * 3,
            [0, 1, -2], [[0, 1, 2]], torch.tensor([0.0, 1.0, 2.0]), torch.tensor([True, True, False]), [None] * 3,
            torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64, device="meta"),
            torch.eye(3, dtype=torch.int64).to_sparse(), ClassTarget([True, False, True]), int, {}, [],
        ],
        ids=repr,
    )  # fmt: skip
    def test_wrong_targets_are_errors(self, target: Any) -> None:
        with pytest.raises(TargetError) as error:
            gradcam.explain(self.model, TINY, "3", target=target)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("function", "message"),
        [
            (lambda output: output.sum(), r"\(3,\)"), (lambda output: output[:2, 0], r"\(3,\)"),
            (lambda output: output.argmax(1), r"\(3,\)"), (lambda output: [1.0, 2.0, 3.0], r"\(3,\)"),
            (lambda output: output[:, :0], r"\(3,\)"), (lambda output: output[:, :, None], r"\(3,\)"),
            (lambda output: output[:, 1].to("meta"), "returned meta torch.float32"),
            (lambda output: output.to_sparse(), "returned sparse_coo torch.float32"),
            (lambda output: output.detach().to(torch.float8_e4m3fn), "returned torch.float8_e4m3fn"),
        ],
    )  # fmt: skip
    def test_bad_functions_are_refused(self, function: Callable[[Tensor], Any], message: str) -> None:
        with pytest.raises(TargetError, match=message):
            gradcam.explain(self.model, TINY, "3", target=function)

    @pytest.mark.parametrize("change", [Tensor.to_sparse, lambda y: y.to(torch.float8_e4m3fn), lambda y: y.to("meta")])
    def test_logits_that_cannot_be_computed_with(self, change: Callable[[Tensor], Tensor]) -> None:
        model = tiny_model()
        model.register_forward_hook(lambda module, args, output: change(output))
        with pytest.raises(TargetError, match=r"a function from the model's output"):
            gradcam.explain(model, TINY, "3")

    def test_the_right_form_is_shown(self) -> None:
        with pytest.raises(TargetError, match="one int per image"):
            gradcam.explain(self.model, TINY, "3", target=[1, 2])
        with pytest.raises(TargetError, match="5 classes, 0 to 4"):
            gradcam.explain(self.model, TINY, "3", target=5)

    def test_an_output_that_is_no_table_of_classes_asks_for_a_function(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1))
        with pytest.raises(TargetError, match=r"\(3, 2, 10, 14\).*target="):
            gradcam.explain(model, TINY, "0")
        explanation = gradcam.explain(model, TINY, "0", target=lambda output: output[:, 1].mean((1, 2)))
        assert explanation.maps.any()


def test_a_mapping_that_is_no_dict_gives_keyword_arguments() -> None:
    from collections import UserDict

    model = TwoInputs().eval()
    arguments = {"numbers": torch.zeros(3, 2), "images": TINY}
    explanation = gradcam.explain(model, UserDict(arguments), "body.3", target=1)
    torch.testing.assert_close(explanation.maps, gradcam.explain(model, arguments, "body.3", target=1).maps)


def test_an_explanation_is_frozen_and_has_a_one_line_repr() -> None:
    explanation = gradcam.explain(tiny_model().eval(), TINY, "3")
    assert repr(explanation) == "Explanation(3 image(s), 1 map(s) each, gradcam at 3, 6 x 8 to 12 x 16, cpu)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        explanation.layer = "4"  # type: ignore[misc]
    assert explanation.maps.dtype == explanation.heatmaps.dtype == explanation.scores.dtype == torch.float32
    assert not explanation.output.requires_grad


def test_a_blank_map_stays_zero() -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))
    with torch.no_grad():
        model[4].weight.copy_(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))
    explanation = gradcam.explain(model, TINY, "1", target=[[0, 1]] * 3)
    assert explanation.heatmaps[:, 0].amax((1, 2)).tolist() == [1.0, 1.0, 1.0]
    assert not explanation.maps[:, 1].any()
    assert not explanation.heatmaps[:, 1].any()


@pytest.mark.parametrize("sizes", [(4, 6, 8), (5, 5, 5)])
def test_volumes_keep_their_rank(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv3d(1, 3, 3, stride=2, padding=1)
    model = nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(3, 2))
    volumes = torch.randn(2, 1, *sizes)
    explanation = gradcam.explain(model, volumes, "0", target=1)
    expected = slow_maps(model, volumes, "0", [1, 1])
    torch.testing.assert_close(explanation.maps.double(), expected, rtol=1e-4, atol=1e-7)
    assert explanation.heatmaps.shape == (2, 1, *sizes)
    large = oracles.resize_cubic(expected[0, 0].numpy(), sizes)
    if large.max() > 0:
        np.testing.assert_allclose(explanation.heatmaps[0, 0].numpy(), large / large.max(), atol=1e-4)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.shift = tiny_model(), nn.Linear(2, 5)

    def forward(self, numbers: Tensor, images: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        return {"logits": self.body(images) * scale + self.shift(numbers)}


def test_several_inputs_and_a_dict_for_an_output() -> None:
    model = TwoInputs().eval()
    numbers = torch.randn(3, 2)
    positional = gradcam.explain(model, (numbers, TINY), "body.3", target=1)
    keywords = gradcam.explain(model, {"numbers": numbers, "images": TINY, "scale": 1.0}, "body.3", target=1)
    torch.testing.assert_close(positional.maps, keywords.maps)
    expected = gradcam.explain(model.body, TINY, "3", target=1)
    torch.testing.assert_close(positional.maps, expected.maps, rtol=1e-4, atol=1e-6)
    assert not positional.output["logits"].requires_grad
    automatic = gradcam.explain(model, (numbers, TINY), target=1)
    assert automatic.layer == "body.4"


class TestPrecision:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_maps_in_any_precision_agree(self, classifier: gradcam.Classifier, photo: Any, dtype: torch.dtype) -> None:
        import copy

        images = classifier.batch([gradcam.read_image(photo("koala.webp")), gradcam.read_image(photo("panda.webp"))])
        expected = classifier_maps(classifier.model, images)
        maps = classifier_maps(copy.deepcopy(classifier.model).to(dtype), images.to(dtype))
        assert maps.dtype == torch.float32
        correlation = np.corrcoef(expected.flatten(), maps.flatten())[0, 1]
        assert correlation > 0.999

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast(self, dtype: torch.dtype) -> None:
        model = tiny_model().eval()
        expected = gradcam.explain(model, TINY, "3", target=1)
        with torch.autocast("cpu", dtype=dtype):
            explanation = gradcam.explain(model, TINY, "3", target=1)
            assert torch.is_autocast_enabled("cpu")
        assert explanation.output.dtype == dtype
        assert np.corrcoef(expected.heatmaps.flatten(), explanation.heatmaps.flatten())[0, 1] > 0.999

    @pytest.mark.parametrize("factor", [1e-7, 1e6])
    def test_float16_gradients_that_underflow_or_overflow(self, factor: float) -> None:
        expected = gradcam.explain(tiny_model().eval(), TINY, "3", target=lambda output: output[:, 1] * factor)
        half = tiny_model().eval().half()
        explanation = gradcam.explain(half, TINY.half(), "3", target=lambda output: output[:, 1].float() * factor)
        assert explanation.maps.any()
        torch.testing.assert_close(explanation.heatmaps, expected.heatmaps, rtol=0, atol=0.02)

    def test_float16_in_the_tail_alone(self) -> None:
        def forward(module: Any, images: Tensor) -> Tensor:
            x = module.norm(images).to(module.body.weight.dtype)
            return module.head(module.body(x).relu().mean((2, 3))).float() * 1e-5

        images, maps = torch.randn(1, 3, 64, 64), []
        for dtype in (torch.float32, torch.float16):
            torch.manual_seed(0)
            body, head = nn.Conv2d(3, 16, 3).to(dtype), nn.Linear(16, 3).to(dtype)
            model = FunctionModule(forward, norm=nn.GroupNorm(1, 3), body=body, head=head)
            maps.append(gradcam.explain(model, images, "norm", target=[[0, 1, 2]]).heatmaps)
        torch.testing.assert_close(maps[1], maps[0], rtol=0, atol=0.02)

    def test_float16_activations_that_overflow_are_an_error(self) -> None:
        model = tiny_model().eval().half()
        with torch.no_grad():
            model[3].weight.fill_(60000)
        with pytest.raises(ModelError, match=r"'3' are (infinite|NaN).*float16.*bfloat16"):
            gradcam.explain(model, TINY.half(), "3", target=1)


def classifier_maps(model: nn.Module, images: Tensor) -> Tensor:
    return gradcam.explain(model, images, "layer4", target=[105, 388]).maps


def test_nan_in_the_images_or_behind_the_layer_is_an_error() -> None:
    images, model = TINY.clone(), tiny_model().eval()
    images[1, 0, 3, 3] = torch.nan
    with pytest.raises(ModelError, match="activations of layer '0' are NaN"):
        gradcam.explain(model, images, "0", target=1)
    with torch.no_grad():
        model[8].weight[1, 2] = torch.nan
    with pytest.raises(ModelError, match="gradients at layer '0' are NaN"):
        gradcam.explain(model, TINY, "0", target=1)


class TestModes:
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
    @pytest.mark.parametrize("frozen", [False, True])
    def test_in_every_grad_mode(self, mode: Callable[[], Any], frozen: bool) -> None:
        model = tiny_model().eval().requires_grad_(not frozen)
        expected = slow_maps(tiny_model().eval(), TINY, "3", [1, 1, 1])
        with mode():
            images = TINY * 1  # in inference mode, this is an inference tensor
            explanation = gradcam.explain(model, images, "3", target=1)
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        torch.testing.assert_close(explanation.maps.double(), expected, rtol=1e-4, atol=1e-7)
        assert before == (mode is torch.enable_grad, mode is torch.inference_mode)
        tensors = explanation.maps, explanation.heatmaps
        assert not any(tensor.is_inference() or tensor.requires_grad for tensor in tensors)

    def test_inference_tensors_deep_in_the_input(self) -> None:
        model = TwoInputs().eval()
        with torch.inference_mode():
            arguments = {"numbers": torch.randn(3, 2), "images": TINY * 1}
            explanation = gradcam.explain(model, arguments, "body.3", target=1)
        assert explanation.maps.any()

    def test_parameters_made_in_inference_mode_are_refused(self) -> None:
        with torch.inference_mode():
            model = tiny_model().eval()
        with pytest.raises(ModelError, match="inference_mode"):
            gradcam.explain(model, TINY, "3")

    @pytest.mark.parametrize("target", [1, [[1, 2]] * 3])
    @pytest.mark.parametrize(
        ("behind", "message"),
        [
            (
                lambda y, before: _changed_after_use(y.sigmoid()),
                "overwrites a value that the backward pass needs",
            ),
            (lambda y, before: before.add_(y[:, :1]).expand_as(y) * y, "another view of the layer's output or input"),
            (lambda y, before: torch.igamma(y.abs() + 1, y.abs() + 1), "operation without a derivative"),
        ],
    )
    def test_errors_of_autograd(self, behind: Callable[[Tensor, Tensor], Tensor], message: str, target: Any) -> None:
        def forward(module: Any, images: Tensor) -> Tensor:
            before = torch.zeros(images[:, :2].shape)[:, :1]
            return module.head(behind(module.body(images), before).mean((2, 3)))

        model = FunctionModule(forward, body=nn.Conv2d(3, 4, 1), head=nn.Linear(4, 5))
        with pytest.raises(ModelError, match=message) as caught:
            gradcam.explain(model, TINY, "body", target=target)
        assert isinstance(caught.value.__cause__, RuntimeError)

    def test_a_training_model_is_explained_in_evaluation_mode(self) -> None:
        expected = gradcam.explain(tiny_model().eval(), TINY, "3", target=1)
        explanation = gradcam.explain(tiny_model().train(), TINY, "3", target=1)
        torch.testing.assert_close(explanation.maps, expected.maps)


def _changed_after_use(values: Tensor) -> Tensor:
    squares = values * values
    return squares + values.add_(1)


def test_maps_that_overflow_float32_are_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).double()
    with torch.no_grad():
        model[0].weight.fill_(1e30)
        model[3].weight.fill_(1e30)
    with pytest.raises(ModelError, match="gradcam maps at layer '0', in float32, are infinite"):
        gradcam.explain(model, torch.ones(1, 3, 8, 8, dtype=torch.float64), "0", target=1)


class FailingModel(nn.Module):
    """A model that draws random numbers and raises the given exception."""

    def __init__(self, failure: type[BaseException] | None = None) -> None:
        super().__init__()
        self.body, self.failure = tiny_model(), failure

    def forward(self, images: Tensor) -> Tensor:
        x = self.body[:4](images + 0 * torch.rand(1))
        if self.failure:
            raise self.failure("on purpose")
        return self.body[4:](x)


class TestNoTrace:
    @pytest.mark.parametrize("failure", [None, ValueError, KeyboardInterrupt, IndexError])
    def test_on_the_model(self, failure: type[BaseException] | None) -> None:
        model = FailingModel(failure).train().to(memory_format=torch.channels_last)
        model.body[1].eval()  # now the training flags differ between modules
        model.body[0].weight.requires_grad_(False)
        model.body[8].weight.grad = torch.ones_like(model.body[8].weight)
        before = traces(model)
        if failure is None:
            gradcam.explain(model, TINY, "body.3", target=[[0, 1]] * 3)
            gradcam.explain(model, TINY)
        else:
            with pytest.raises(failure, match="on purpose"):
                gradcam.explain(model, TINY, "body.3")
        assert_same(before, traces(model))

    def test_on_the_images(self) -> None:
        images = TINY.clone().requires_grad_()
        gradcam.explain(tiny_model(), images, "0")
        assert images.requires_grad
        assert images.grad is None
        assert torch.equal(images, TINY)

    def test_memory_does_not_grow(self) -> None:
        import gc

        def count() -> int:
            gc.collect()
            return sum(1 for thing in gc.get_objects() if type(thing) is Tensor)

        model = tiny_model().eval()
        gradcam.explain(model, TINY, "3")
        before = count()
        for _ in range(5):
            gradcam.explain(model, TINY, "3", target=[[0, 1]] * 3)
        assert count() == before


class TestThreads:
    def test_many_threads_explain_one_training_model(self) -> None:
        model = tiny_model().train()
        model[1].eval()
        before = traces(model)
        batches = [TINY + 0.1 * i for i in range(4)]
        expected = [gradcam.explain(model, batch, "3", target=[[0, 1, 2]] * 3).maps for batch in batches]

        def work(i: int) -> None:
            for _ in range(25):
                maps = gradcam.explain(model, batches[i], "3", target=[[0, 1, 2]] * 3).maps
                torch.testing.assert_close(maps, expected[i])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert_same(before, traces(model))

    def test_overlapping_explanations_restore_the_flags_when_the_last_one_ends(self) -> None:
        first_is_in, second_is_done = threading.Event(), threading.Event()

        class Waits(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                if threading.current_thread().name == "first":
                    first_is_in.set()
                    assert second_is_done.wait(10)
                return x

        model = nn.Sequential(*tiny_model(), Waits()).train()
        before = traces(model)
        first = threading.Thread(target=lambda: gradcam.explain(model, TINY, "3"), name="first")
        first.start()
        assert first_is_in.wait(10)
        # Without counting, this call would restore the training flags that the first call has set.
        gradcam.explain(model, TINY, "3")
        assert not any(module.training for module in model.modules())  # the first call still needs evaluation mode
        second_is_done.set()
        first.join()
        assert_same(before, traces(model))


class TestWrappers:
    expected = gradcam.explain(tiny_model().eval(), TINY, "3", target=1).maps

    @pytest.mark.parametrize("layer", ["3", "module.3"])
    def test_data_parallel(self, layer: str) -> None:
        explanation = gradcam.explain(nn.DataParallel(tiny_model()), TINY, layer, target=1)
        torch.testing.assert_close(explanation.maps, self.expected)
        assert explanation.layer == "3"

    def test_compiled_in_every_way_and_warmed_up(self) -> None:
        compiled = Compiled(tiny_model().eval(), TINY)
        wrapped = compiled.module
        in_place = tiny_model().eval()
        in_place.compile(backend="eager")
        inner = nn.Sequential(torch.compile(tiny_model().eval(), backend="eager"))
        cases = [(wrapped, "3"), (wrapped, "_orig_mod.3"), (in_place, "3"), (inner, "0._orig_mod.3"), (inner, "0.3")]
        for model, layer in cases:
            with torch.no_grad():
                model(TINY)
                model(TINY)
            explanation = gradcam.explain(model, TINY, layer, target=1)
            torch.testing.assert_close(explanation.maps, self.expected)
        assert compiled.is_compiled()

    def test_a_compiled_layer_given_as_a_module(self) -> None:
        model = tiny_model().eval()
        model[3] = torch.compile(model[3], backend="eager")
        with torch.no_grad():
            model(TINY)
        torch.testing.assert_close(gradcam.explain(model, TINY, model[3], target=1).maps, self.expected)

    def test_what_is_no_module_is_refused(self) -> None:
        model = tiny_model().eval()
        with pytest.raises(ModelError, match="TorchScript"):
            gradcam.explain(torch.jit.trace(model, TINY), TINY, "3")
        with pytest.raises(ModelError, match=r"function, expected a torch\.nn\.Module"):
            gradcam.explain(lambda images: images, TINY, "3")
        with pytest.raises(ModelError, match=r"torch\.nn\.Module.*vmap"):
            gradcam.explain(torch.func.vmap(model), TINY, "3")
        with pytest.raises(ModelError, match="vmap"):
            torch.func.vmap(lambda image: gradcam.explain(model, image[None], "3", target=1).maps)(TINY)


class TestLayerErrors:
    @pytest.mark.parametrize(
        ("layer", "message"),
        [
            ("5x", "no layer '5x' in Sequential.*Nearest"), ("8", r"'8' returns \(3, 5\).*no spatial grid"),
            ("5", r"'5' returns \(3, 6, 1, 1\).*no spatial grid"), ("", "no layer ''"),
            (3, "is 3, expected a dotted name"), (nn.Conv2d(1, 1, 1), "not part of the model"),
        ],
    )  # fmt: skip
    def test_message(self, layer: Any, message: str) -> None:
        with pytest.raises(LayerError, match=message):
            gradcam.explain(tiny_model().eval(), TINY, layer)

    def test_the_model_itself(self) -> None:
        model = tiny_model().eval()
        with pytest.raises(LayerError, match="the model itself"):
            gradcam.explain(model, TINY, model)

    def test_a_layer_off_the_path_to_the_score(self) -> None:
        model = FunctionModule(
            lambda module, images: (module.aside(images), module.body(images))[1],
            aside=nn.Conv2d(3, 2, 1), body=tiny_model(),
        )  # fmt: skip
        with pytest.raises(LayerError, match="does not depend on layer 'aside'"):
            gradcam.explain(model.eval(), TINY, "aside")

    def test_a_factor_of_zero(self) -> None:
        model = tiny_model().eval()
        with torch.no_grad():
            model[8].weight.zero_()
        with pytest.raises(LayerError, match="'3' is exactly zero"):
            gradcam.explain(model, TINY, "3", target=1)

    def test_the_output_of_the_last_block_of_a_vit_names_the_norm_before_its_attention(self) -> None:
        torch.manual_seed(0)
        vit = torchvision.models.VisionTransformer(
            image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=5
        ).eval()
        nn.init.normal_(vit.heads.head.weight)
        images = torch.randn(2, 3, 32, 32)
        norm = "encoder.layers.encoder_layer_1.ln_1"
        with pytest.raises(LayerError, match=f"zero on every patch.*'{norm}'"):
            gradcam.explain(vit, images, "encoder.layers.encoder_layer_1")
        explanation = gradcam.explain(vit, images)
        assert explanation.layer == norm
        pair = oracles.reference(vit.double(), images.double(), [norm], lambda output: output.amax(1).sum())[norm]
        first = [tensor[0, 1:].T.unflatten(1, (4, 4)) for tensor in pair]
        torch.testing.assert_close(explanation.maps[0, 0].double(), oracles.gradcam_map(*first), rtol=1e-4, atol=1e-7)

    def test_recording_disabled_inside_the_model(self) -> None:
        def forward(module: Any, images: Tensor) -> Tensor:
            with torch.no_grad():
                x = module.body[:5](images)
            return module.body[5:](x)

        with pytest.raises(ModelError, match="disables recording"):
            gradcam.explain(FunctionModule(forward, body=tiny_model()).eval(), TINY, "body.3")

    def test_recording_disabled_between_two_layers(self) -> None:
        def forward(module: Any, images: Tensor) -> Tensor:
            with torch.no_grad():
                x = module.first(images)
                y = module.middle(x)
            return (module.last(y.sin()) * x).mean((2, 3))

        middle, last = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        model = FunctionModule(forward, first=nn.Conv2d(3, 4, 3, padding=1), middle=middle, last=last)
        with pytest.raises(ModelError, match="disables recording"):
            gradcam.compare(model, TINY, layers=["first", "last"], methods=["gradcam"])
        assert gradcam.explain(model, TINY, "last", target=1).maps.isfinite().all()

    @pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
    def test_a_reentrant_checkpoint_around_the_layer(self) -> None:
        from torch.utils.checkpoint import checkpoint

        def forward(module: Any, images: Tensor) -> Tensor:
            return module.body[5:](checkpoint(module.body[:5], images, use_reentrant=module.reentrant))

        model = FunctionModule(forward, body=tiny_model()).eval()
        model.reentrant = True
        with pytest.raises(ModelError, match="disables recording"):
            gradcam.explain(model, TINY, "body.3")
        model.reentrant = False
        torch.testing.assert_close(gradcam.explain(model, TINY, "body.3", target=1).maps, TestWrappers.expected)

    def test_somebodys_full_backward_hook_before_an_operation_in_place(self) -> None:
        model = tiny_model().eval()
        model[3].register_full_backward_hook(lambda module, grad_input, grad_output: None)
        with pytest.raises(ModelError, match="full backward hook.*in place"):
            gradcam.explain(model, TINY, "1")

    def test_errors_of_the_model_come_through_as_they_are(self) -> None:
        with pytest.raises(RuntimeError, match="channels"):
            gradcam.explain(tiny_model().eval(), torch.randn(1, 4, 8, 8), "3")

    def test_layers_as_one_string_and_none_at_all(self) -> None:
        with pytest.raises(LayerError, match="list"):
            gradcam.compare(tiny_model(), TINY, layers="3", methods=["gradcam"])
        with pytest.raises(GradcamError, match="methods is"):
            gradcam.compare(tiny_model(), TINY, layers=["3"], methods=[])

    def test_an_unknown_method(self) -> None:
        with pytest.raises(GradcamError, match="'grad_cam'.*'gradcam'"):
            gradcam.explain(tiny_model(), TINY, "3", method="grad_cam")

    def test_rows_that_are_not_the_images(self) -> None:
        def forward(module: Any, images: Tensor) -> Tensor:
            halves = torch.cat(images.chunk(2, dim=3))
            return module.conv(halves).mean((2, 3)).unflatten(0, (2, -1)).sum(0)

        with pytest.raises(LayerError, match="first axis is not the batch"):
            gradcam.explain(FunctionModule(forward, conv=nn.Conv2d(3, 5, 1)), TINY, "conv")


@pytest.mark.parametrize(
    "images", [TINY[0], TINY.to(torch.uint8), "photo.jpg", None, (), {}, [1], TINY[:0], TINY[..., :0]], ids=str
)
def test_wrong_images_are_errors(images: Any) -> None:
    with pytest.raises(ImageError) as error:
        gradcam.explain(tiny_model(), images, "3")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("resnet18", "layer4"), ("vgg11", "features"), ("densenet121", "features"), ("mobilenet_v2", "features"),
        ("squeezenet1_1", "classifier.2"),
    ],
)  # fmt: skip
def test_the_automatic_layer_is_the_last_with_a_grid(name: str, layer: str) -> None:
    images = images_for(1)
    explanation = gradcam.explain(model_called(name), images)
    assert explanation.layer == layer
    index = int(model_called(name)(images).argmax())
    torch.testing.assert_close(explanation.maps, gradcam.explain(model_called(name), images, layer, target=index).maps)


def test_many_classes_cost_one_forward_pass_and_nothing_runs_before_the_layer_in_backward() -> None:
    model = tiny_model().eval()
    passes, backward = [], []
    model[0].register_forward_hook(lambda module, args, output: passes.append(output.requires_grad))
    model[0].weight.register_hook(lambda gradient: backward.append(gradient))
    for count in (1 + len(TINY), 1):  # the first call also runs each image alone
        passes.clear()
        gradcam.explain(model, TINY, "3", target=[[0, 1, 2, 3, 4]] * 3)
        assert passes == [False] * count
        assert backward == []


@pytest.mark.cuda
def test_cuda_agrees_with_the_cpu(classifier: gradcam.Classifier, photo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # TF32 is on by default and rounds to ten bits of mantissa.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    images = classifier.batch([gradcam.read_image(photo(name)) for name in ("koala.webp", "panda.webp")])
    expected = gradcam.explain(classifier.model, images, "layer4", target=[[105, 388]] * 2)
    on_cuda = gradcam.load_classifier(device="cuda")
    explanation = gradcam.explain(on_cuda.model, images.cuda(), "layer4", target=[[105, 388]] * 2)
    assert explanation.maps.is_cuda
    assert explanation.heatmaps.is_cuda
    torch.testing.assert_close(explanation.heatmaps.cpu(), expected.heatmaps, rtol=0, atol=2e-3)
    assert all(tensor.is_cuda for tensor in containers.list_tensors(explanation.output))


@pytest.mark.cuda
def test_the_random_state_of_the_gpu_is_left_alone() -> None:
    model = FunctionModule(lambda module, x: module.inner(x + torch.rand_like(x)), inner=tiny_model().eval()).cuda()
    before = torch.cuda.get_rng_state()
    model(TINY.cuda())
    assert not torch.equal(torch.cuda.get_rng_state(), before)  # the model does draw from the CUDA generator
    before = torch.cuda.get_rng_state()
    gradcam.explain(model, TINY.cuda(), "inner.3")
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_compare_equals_explain_behind_an_in_place_layer() -> None:
    """Use the input of the in-place layer elsewhere as well, and record it at an earlier layer."""

    def forward(module: Any, images: Tensor) -> Tensor:
        x = module.before(images)
        return (module.conv(module.act(x)) ** 2).mean((2, 3)) + (x * x).mean((2, 3))

    parts = {"before": nn.Conv2d(3, 4, 3), "act": nn.ReLU(inplace=True), "conv": nn.Conv2d(4, 4, 3)}
    model = FunctionModule(forward, **parts)
    both = gradcam.compare(model, TINY, layers=["before", "act"], methods=["gradcam"], target=1)
    for layer in ("before", "act"):
        alone = gradcam.explain(model, TINY, layer, target=1)
        torch.testing.assert_close(both[layer, "gradcam"].maps, alone.maps)
        assert torch.equal(both[layer, "gradcam"].output, model(TINY))


def test_a_repeated_method_is_computed_once() -> None:
    explanations = gradcam.compare(tiny_model(), TINY, layers=["3", "3"], methods=["gradcam", "gradcam"])
    assert list(explanations) == [("3", "gradcam")]
    assert explanations["3", "gradcam"].maps.shape[1] == explanations["3", "gradcam"].scores.shape[1] == 1


def test_a_model_that_changes_its_images_sees_each_of_them_once() -> None:
    images = TINY.clone()
    model = FunctionModule(lambda module, images: module.body(images.mul_(2).add_(1)), body=tiny_model()).eval()
    explanation = gradcam.explain(model, images, target=1)
    assert torch.equal(images, TINY)
    torch.testing.assert_close(explanation.output, model(images))


def test_one_image_is_enough_to_find_the_layer() -> None:
    model, sizes = tiny_model(), []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    gradcam.explain(model, TINY, target=1)
    assert sizes[:2] == [1, 3]
    assert sizes[-3:] == [1] * 3  # each image alone, after the cells of the layer were located
    sizes.clear()
    gradcam.explain(model, TINY, target=1)
    assert sizes == [3]


def test_the_only_layer_is_a_dead_end() -> None:
    parts = {"body": nn.Conv2d(3, 4, 3), "head": nn.Linear(4, 5)}
    model = FunctionModule(lambda module, images: module.head(0 * module.body(images).mean((2, 3))), **parts)
    with pytest.raises(LayerError, match="zero at every layer that has a grid"):
        gradcam.explain(model, TINY)


def test_a_compiled_layer_is_treated_like_the_layer_inside() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, (1, 9)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)).eval()
    images = torch.randn(1, 3, 16, 16)
    plain = gradcam.explain(model, images, "0", target=1)
    model[0] = torch.compile(model[0], backend="eager")
    for layer in ("0", None):
        compiled = gradcam.explain(model, images, layer, target=1)
        assert compiled.layer == "0"
        assert torch.equal(compiled.maps, plain.maps)


def test_twenty_classes_share_one_backward_pass() -> None:
    passes = []

    class Counting(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            passes.append(1)
            return gradient

    parts = {"body": nn.Conv2d(3, 4, 3), "head": nn.Linear(4, 30)}
    model = FunctionModule(lambda module, x: module.head(Counting.apply(module.body(x)).mean((2, 3))), **parts)
    for _ in range(2):
        explanation = gradcam.explain(model, TINY, "body", target=[list(range(20))] * 3)
        assert explanation.maps.shape[1] == 20
        assert len(passes) == 1 + 2  # two passes check whether images depend on one another
        passes.clear()


def test_everything_but_the_output_is_float32_for_a_float64_model() -> None:
    explanation = gradcam.explain(tiny_model().double(), TINY.double(), "3")
    assert explanation.output.dtype == torch.float64
    assert {explanation.maps.dtype, explanation.heatmaps.dtype, explanation.scores.dtype} == {torch.float32}


def test_scores_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(ModelError, match="The scores are infinite"):
        gradcam.explain(tiny_model(), TINY, "3", target=lambda output: output[:, 1] + float("inf"))


def test_unknown_argument_names_are_errors() -> None:
    with pytest.raises(ImageError, match=r"keys \[0\], expected the names"):
        gradcam.explain(tiny_model(), {0: TINY}, "3")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_images_are_refused() -> None:
    images = torch.nested.nested_tensor([torch.zeros(3, 8, 8), torch.zeros(3, 6, 8)])
    with pytest.raises(ImageError, match="nested tensor, expected a batch of images of one size"):
        gradcam.explain(tiny_model(), images, "3")


@pytest.mark.parametrize("layer", [torch.zeros(30, 30), "c\n2", "x" * 500, 3, None.__class__])
def test_an_error_about_a_layer_is_one_short_line(layer: Any) -> None:
    with pytest.raises(LayerError) as caught:
        gradcam.explain(tiny_model(), TINY, layer)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_head_of_zero_weights_has_no_default_layer() -> None:
    model = tiny_model()
    nn.init.zeros_(model[-1].weight)
    with pytest.raises(LayerError, match="zero at every layer that has a grid.*a head with zero weights"):
        gradcam.explain(model, TINY)


def test_a_model_that_changes_its_images_in_place_leaves_no_graph_on_the_callers() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(3 * 8 * 8, 5))
    images = torch.randn(2, 3, 8, 8)
    explanation = gradcam.explain(model, images, "0", target=1)
    assert images.grad_fn is None
    assert not images.requires_grad
    assert explanation.maps.any()


@dataclasses.dataclass
class Answer:
    logits: Tensor
    count: int = 3


class Pair(NamedTuple):
    logits: Tensor
    others: Tensor


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: (logits, logits[:, :2].sum(1)), lambda logits: [logits],
        lambda logits: {"logits": logits, "loss": None}, lambda logits: {"out": {"logits": logits}}, Answer,
        lambda logits: Pair(logits, logits.flip(1)), lambda logits: transformers_output(logits),
    ],
    ids=["tuple", "list", "dict", "nested dict", "dataclass", "named tuple", "ModelOutput"],
)  # fmt: skip
def test_logits_in_any_container(change: Callable[[Tensor], Any]) -> None:
    model = FunctionModule(lambda module, images: change(module.body(images)), body=tiny_model()).eval()
    expected = slow_maps(tiny_model().eval(), TINY, "3", [1, 4, 1])
    explanation = gradcam.explain(model, TINY, "body.3", target=[1, 4, 1])
    torch.testing.assert_close(explanation.maps.double(), expected, rtol=1e-4, atol=1e-7)
    assert type(explanation.output) is type(model(TINY))
    assert not any(tensor.requires_grad for tensor in containers.list_tensors(explanation.output))
    again = gradcam.explain(model, TINY, target=1)
    assert again.layer == "body.4"


def transformers_output(logits: Tensor) -> Any:
    from transformers.modeling_outputs import ImageClassifierOutput

    return ImageClassifierOutput(logits=logits, hidden_states=(logits.exp(),))


def test_several_inputs_of_any_kind_beside_the_images() -> None:
    def forward(module: Any, ages: Tensor, images: Tensor, *, extra: dict[str, Tensor]) -> Tensor:
        return module.body(images * extra["mask"]) * ages[:, None] + extra["shift"]

    model = FunctionModule(forward, body=tiny_model()).eval()
    ages, mask = torch.tensor([1.0, 2.0, 3.0]), (torch.rand(3, 1, 12, 16) > 0.3).float()
    extra = {"mask": mask, "shift": torch.randn(5)}
    arguments = {"ages": ages, "images": TINY, "extra": extra}
    explanation = gradcam.explain(model, arguments, "body.3", target=2)
    expected = slow_maps(tiny_model().eval(), TINY * mask, "3", [2, 2, 2]) * ages[:, None, None, None]
    torch.testing.assert_close(explanation.maps.double(), expected, rtol=1e-4, atol=1e-7)
    assert gradcam.explain(model, arguments).layer == "body.4"


class VolumeTransformer(nn.Module):
    """A transformer over patches of a volume, with a class token first."""

    def __init__(self, patch: tuple[int, int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.token = nn.Conv3d(1, 8, patch, stride=patch), nn.Parameter(torch.randn(1, 1, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        self.last = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, volumes: Tensor) -> Tensor:
        patches = self.stem(volumes).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(volumes), -1, -1), patches], 1)
        return self.head(self.last(self.block(tokens))[:, 0])


@pytest.mark.parametrize(
    ("size", "patch", "grid"), [((8,) * 3, (4,) * 3, (2, 2, 2)), ((8, 24, 36), (2, 12, 12), (4, 2, 3))]
)
def test_tokens_of_a_volume(size: tuple[int, ...], patch: tuple[int, int, int], grid: tuple[int, ...]) -> None:
    model = VolumeTransformer(patch).double().eval()
    volumes = torch.randn(2, 1, *size, dtype=torch.float64)
    explanation = gradcam.explain(model, volumes, target=1)
    assert explanation.layer == "last.norm1"
    assert explanation.heatmaps.shape == (2, 1, *size)
    pair = oracles.reference(model, volumes, ["last.norm1"], lambda output: output[:, 1].sum())["last.norm1"]
    for image, single in enumerate(explanation.maps[:, 0]):
        first = [tensor[image, 1:].T.unflatten(1, grid) for tensor in pair]
        torch.testing.assert_close(single.double(), oracles.gradcam_map(*first), rtol=1e-4, atol=1e-7)


def test_a_volume_network_of_torchvision() -> None:
    torch.manual_seed(0)
    model = torchvision.models.video.r3d_18(weights=None, num_classes=5).eval()
    clips = torch.randn(1, 3, 8, 32, 48)
    explanation = gradcam.explain(model, clips, target=1, evidence="signed")
    assert explanation.layer == "layer4"
    activations, gradients = oracles.reference(model, clips, ["layer4"], lambda output: output[:, 1].sum())["layer4"]
    expected = (gradients.mean((2, 3, 4), keepdim=True) * activations).sum(1, keepdim=True)
    assert expected.shape[2:] == (1, 2, 3)
    torch.testing.assert_close(explanation.maps, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize(("name", "size"), [("googlenet", 64), ("inception_v3", 128)])
def test_auxiliary_heads_of_a_model_in_training_mode(name: str, size: int) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_classes": 5, "init_weights": False, "aux_logits": True, "transform_input": True}
    model = torchvision.models.get_model(name, weights=None, **options).train()
    images = torch.randn(2, 3, size, size)
    before = traces(model)
    explanation = gradcam.explain(model, images, target=1, evidence="signed")
    assert_same(before, traces(model))
    layer = {"googlenet": "inception5b", "inception_v3": "Mixed_7c"}[name]
    assert explanation.layer == layer
    pair = oracles.reference(model.eval(), images, [layer], lambda output: output[:, 1].sum())[layer]
    expected = (pair[1].mean((2, 3), keepdim=True) * pair[0]).sum(1, keepdim=True)
    torch.testing.assert_close(explanation.maps, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def test_a_model_of_a_fixed_batch_size_is_searched_with_it() -> None:
    def forward(module: Any, images: Tensor) -> Tensor:
        sizes.append(len(images))
        return module.body[5:](module.body[:5](images).view(3, 6, 6, 8))

    sizes: list[int] = []
    model = FunctionModule(forward, body=tiny_model()).eval()
    explanation = gradcam.explain(model, TINY, target=1)
    assert explanation.layer == "body.4"
    assert sizes[:3] == [1, 3, 3]
    torch.testing.assert_close(explanation.maps, gradcam.explain(model.body, TINY, "4", target=1).maps)
