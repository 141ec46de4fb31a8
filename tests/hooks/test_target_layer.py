"""Check the pair of hooks on every module of five networks, and in every case that has broken such hooks."""

import contextlib
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import gradcam
from gradcam import TargetLayer
from gradcam.errors import GradcamWarning, LayerError, ModelError
from tests import oracles
from tests.helpers import HOOKS, FunctionModule

# With the minimum number of modules to compare. The last two are narrow, because each module takes a full pass.
NETWORKS: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "resnet18": (torchvision.models.resnet18, 40),
    "vgg11": (torchvision.models.vgg11, 20),
    "squeezenet1_1": (torchvision.models.squeezenet1_1, 60),
    "densenet121": (partial(torchvision.models.DenseNet, 4, (6, 12, 24, 16), 8), 300),
    "mobilenet_v2": (partial(torchvision.models.mobilenet_v2, width_mult=0.25), 150),
}


def score_of(output: Tensor) -> Tensor:
    return output[:, 3].sum() + 0.5 * output[:, 1].sum()


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = NETWORKS[name][0](num_classes=5).double().eval()
    # Running statistics like those of a trained network, so that activations do not vanish.
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_module_that_runs_once_equals_the_slow_reference(name: str, frozen: bool) -> None:
    model = network(name).requires_grad_(not frozen)
    size = 64 if name == "squeezenet1_1" else 32
    images = torch.randn(2, 3, size, size, dtype=torch.float64)
    names = oracles.modules_that_run_once(model, images)
    expected = oracles.reference(model, images, names, score_of)
    assert len(expected) >= NETWORKS[name][1]
    module_names = list(expected)[:: 1 if not frozen else 7]
    # A second and a third pass at the same module.
    repeated_names = [module_name for module_name in module_names[::5] for _ in range(2)]
    for module_name in (*module_names, *repeated_names):
        activations, gradients = expected[module_name]
        with TargetLayer(model.get_submodule(module_name)) as layer:
            output = model(images)
            layer.backward(score_of(output))
        torch.testing.assert_close(layer.activations.detach(), activations, rtol=0, atol=0, msg=module_name)
        torch.testing.assert_close(layer.gradients, gradients, rtol=1e-9, atol=1e-14, msg=module_name)
    assert all(parameter.grad is None for parameter in model.parameters())


def small_network() -> nn.Sequential:
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
    first, second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(inplace=True), second, nn.ReLU(inplace=True), *head).double().eval()


def expected_of(model: nn.Module, images: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return oracles.reference(model, images, [name], score_of)[name]


IMAGES = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model() -> nn.Sequential:
    return small_network()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_plain_backward_stores_the_gradients_too(model: nn.Sequential, mode: Callable[[], object]) -> None:
    _, expected = expected_of(model, IMAGES, "2")
    with mode(), TargetLayer(model[2]) as layer:
        score_of(model(IMAGES)).backward()
    torch.testing.assert_close(layer.gradients, expected)


def test_one_context_serves_many_passes_and_scores(model: nn.Sequential) -> None:
    passes = [(images, *expected_of(model, images, "2")) for images in (IMAGES, IMAGES + 1, IMAGES * 2)]
    with TargetLayer(model[2]) as layer:
        for images, activations, gradients in passes:
            output = model(images)
            first = layer.backward(output[:, 0].sum())
            assert not torch.equal(first, layer.backward(score_of(output)))
            torch.testing.assert_close(layer.activations.detach(), activations)
            torch.testing.assert_close(layer.gradients, gradients)


LOOKS: dict[str, Callable[[nn.Module], object]] = {
    "another layer": lambda model: gradcam.explain(model, IMAGES.flip(0), "1", target=2),
    "no layer": lambda model: gradcam.explain(model, IMAGES, target=2),
    "again and again": lambda model: gradcam.explain(model, IMAGES, "2", method="ablationcam", target=2),
    "layers": lambda model: gradcam.list_layers(model, IMAGES),
    "gradients": lambda model: gradcam.inspection.gradients(model, IMAGES),
    "input": lambda model: gradcam.attributions.input_gradients(model, IMAGES),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_an_inspection_of_the_model_counts_as_no_run(model: nn.Sequential, look: Callable[[nn.Module], object]) -> None:
    activations, gradients = expected_of(model, IMAGES, "2")
    look(model)
    with TargetLayer(model[2]) as layer:
        look(model)
        assert not torch.is_grad_enabled()
        output = model(IMAGES)
        look(model)
        torch.testing.assert_close(layer.backward(score_of(output)), gradients)
        look(model)
        torch.testing.assert_close(layer.activations.detach(), activations)
        torch.testing.assert_close(layer.gradients, gradients)


def test_an_explanation_is_the_same_inside_a_target_layer_and_inside_another_explanation(model: nn.Sequential) -> None:
    expected = gradcam.explain(model, IMAGES, "2", target=2).maps
    with TargetLayer(model[2]), TargetLayer(model[0]) as first:
        model(IMAGES)
        torch.testing.assert_close(gradcam.explain(model, IMAGES, "2", target=2).maps, expected)
    inner = []

    def score(output: Tensor) -> Tensor:
        inner.append(gradcam.explain(model, IMAGES, "2", target=2).maps)
        with TargetLayer(model[2]) as layer:  # an explanation inside the score, which needs a gradient of its own
            layer.backward(model(IMAGES)[:, 1].sum())
        inner.append(layer.gradients)
        return output[:, 2]

    torch.testing.assert_close(gradcam.explain(model, IMAGES, "2", target=score).maps, expected)
    torch.testing.assert_close(inner[0], expected)
    assert first.activations.shape == (len(IMAGES), *model[0](IMAGES).shape[1:])


def test_several_layers_in_one_pass_do_not_cut_one_another_off(model: nn.Sequential) -> None:
    with TargetLayer(model[0]) as first, TargetLayer(model[2]) as second, TargetLayer(model[3]) as third:
        output = model(IMAGES)
        activations = [layer.activations for layer in (first, second, third)]
        gradients = torch.autograd.grad(score_of(output), activations, retain_graph=True)
    for name, layer, gradient in zip("023", (first, second, third), gradients):
        activations, expected = expected_of(model, IMAGES, name)
        torch.testing.assert_close(layer.activations.detach(), activations)
        torch.testing.assert_close(gradient, expected)


def make_module(function: Callable[[Any, Tensor], Any], **parts: nn.Module) -> nn.Module:
    return FunctionModule(function, **parts).double().eval()


def convolution(channels: int = 4) -> nn.Module:
    return nn.Conv2d(3, channels, 3, padding=1)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_layer_that_returns_its_input_survives_a_later_in_place_change(recorded: bool) -> None:
    def forward(model: Any, images: Tensor) -> Tensor:
        x = model.before(images)
        y = model.target(x)
        x.mul_(-3)  # this changes y as well, unless the hook has returned a copy
        return model.head((y.relu() + 0 * x).mean((2, 3)))

    model = make_module(forward, before=convolution(), target=nn.Dropout(), head=nn.Linear(4, 5))
    plain = model.before(IMAGES).detach()
    # With an earlier recorded layer, the input requires gradients and cannot become a leaf.
    outer = [TargetLayer(model.before)] if recorded else []
    for layer in outer:
        layer.__enter__()
    with TargetLayer(model.target) as target:
        output = model(IMAGES)
        gradient = target.backward(output[:, 0].sum())
    for layer in outer:
        layer.__exit__(None, None, None)
    torch.testing.assert_close(target.activations.detach(), plain)
    cells = IMAGES.shape[2] * IMAGES.shape[3]
    expected = (plain > 0) * model.head.weight[0, :, None, None].detach() / cells
    torch.testing.assert_close(gradient, expected.expand_as(plain))


@pytest.mark.parametrize("kind", ["tuple", "dict", "named tuple", "list"])
def test_an_output_with_several_values_gives_its_first_floating_tensor(kind: str) -> None:
    import collections

    pair = collections.namedtuple("Pair", ["index", "value"])

    def several(_: object, x: Tensor) -> object:
        index = torch.arange(3)
        kinds = {"tuple": (index, x * 2), "list": [index, x * 2], "dict": {"index": index, "value": x * 2}}
        return {**kinds, "named tuple": pair(index, x * 2)}[kind]

    def forward(model: Any, x: Tensor) -> Tensor:
        output = model.several(x)
        assert type(output).__name__ == {"named tuple": "Pair"}.get(kind, kind)
        return (output["value"] if kind == "dict" else output[1]).square().mean((2, 3))

    model = make_module(forward, several=make_module(several))
    with TargetLayer(model.several) as layer:
        layer.backward(model(IMAGES).sum())
    torch.testing.assert_close(layer.activations.detach(), IMAGES * 2)
    torch.testing.assert_close(layer.gradients, 2 * 2 * IMAGES / 64)


def test_half_precision_gradients_that_underflow_are_kept() -> None:
    def tiny(output: Tensor) -> Tensor:
        return output[:, 1].sum().to(torch.promote_types(output.dtype, torch.float32)) * 1e-7

    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(4 * 64, 2)).double().eval()
    expected = oracles.reference(model, IMAGES, ["0"], tiny)["0"][1]
    half = model.half()
    with TargetLayer(half[0]) as layer:
        output = half(IMAGES.half())
        gradient = layer.backward(tiny(output))
        (plain,) = torch.autograd.grad(tiny(output), layer.activations)
    assert plain.count_nonzero() < plain.numel() / 2  # without scaling, most float16 gradients underflow
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-2, atol=0)


class TestErrors:
    def test_the_layer_has_to_run_once_and_return_a_tensor(self, model: nn.Sequential) -> None:
        layers = {"elsewhere": nn.Identity(), "relu": model[1], "shape": make_module(lambda _, x: tuple(x.shape))}
        messages = {"elsewhere": "did not run", "relu": "ran 2", "shape": "returned no floating-point tensor"}
        for name, message in messages.items():
            with TargetLayer(layers[name], name=name) as layer:
                score = model[1](model(IMAGES)).sum()
                layers["shape"](IMAGES)
                with pytest.raises(LayerError, match=f"'{name}' {message}"):
                    layer.backward(score)

    def test_score_does_not_depend_on_the_layer(self, model: nn.Sequential) -> None:
        with TargetLayer(model[2], name="second") as layer:
            for score in (model(IMAGES).detach().sum(), IMAGES.clone().requires_grad_().sum()):
                with pytest.raises(LayerError, match="does not depend on layer 'second'"):
                    layer.backward(score)

    def test_recording_switched_off(self, model: nn.Sequential) -> None:
        with TargetLayer(model[2], name="second") as layer:
            with torch.no_grad():
                output = model(IMAGES)
            torch.set_grad_enabled(False)
            with pytest.raises(ModelError, match="recording is off after layer 'second'"):
                layer.backward(output.detach().sum())

    def test_no_gradients_yet(self, model: nn.Sequential) -> None:
        with TargetLayer(model[2]) as layer:
            model(IMAGES)
            with pytest.raises(LayerError, match="call layer.backward"):
                _ = layer.gradients

    def test_inference_mode(self) -> None:
        with torch.inference_mode(), pytest.raises(ModelError, match="inference_mode"), TargetLayer(nn.Identity()):
            pass

    def test_entered_twice(self, model: nn.Sequential) -> None:
        layer = TargetLayer(model[2], name="second")
        with layer, pytest.raises(LayerError, match="'second' is already recorded"):
            layer.__enter__()
        assert torch.is_grad_enabled()
        assert hooks_on(model) == 0

    @pytest.mark.parametrize("score", [3.0, torch.zeros(2), torch.tensor(1)], ids=str)
    def test_a_score_that_is_none(self, model: nn.Sequential, score: object) -> None:
        with TargetLayer(model[2]) as layer:
            model(IMAGES)
            with pytest.raises(LayerError, match="expected a floating-point tensor with one value"):
                layer.backward(score)  # type: ignore[arg-type]

    def test_no_module(self) -> None:
        with pytest.raises(LayerError, match=r"'layer4', expected a torch\.nn\.Module"):
            TargetLayer("layer4")  # type: ignore[arg-type]

    def test_vmap(self, model: nn.Sequential) -> None:
        with TargetLayer(model[2]), pytest.raises(ModelError, match="vmap"):
            torch.func.vmap(lambda image: model(image[None]))(IMAGES)

    def test_torchscript(self) -> None:
        scripted = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
        with pytest.raises(ModelError, match="TorchScript"):
            TargetLayer(scripted)


def hooks_on(model: nn.Module) -> int:
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in HOOKS)


@pytest.mark.parametrize("mode", [True, False])
def test_leaves_no_hook_and_no_grad_mode_behind_also_after_an_error(model: nn.Sequential, mode: bool) -> None:
    with torch.set_grad_enabled(mode):
        with pytest.raises(RuntimeError, match="size"), TargetLayer(model[2]):
            model(torch.randn(1, 3, 8, 8, dtype=torch.float64)) + torch.zeros(7)
        assert torch.is_grad_enabled() is mode
        assert hooks_on(model) == 0
        with TargetLayer(model[2]) as layer:
            layer.backward(score_of(model(IMAGES)))
        assert torch.is_grad_enabled() is mode
        assert hooks_on(model) == 0


def test_nothing_before_the_layer_is_recorded(model: nn.Sequential) -> None:
    records = []
    model[0].register_forward_hook(lambda module, args, output: records.append(output.requires_grad))
    with TargetLayer(model[2]) as layer:
        layer.backward(score_of(model(IMAGES)))
    assert records == [False]
    assert layer.activations.is_leaf


def test_activations_are_freed_when_the_layer_is_forgotten(model: nn.Sequential) -> None:
    gc.disable()  # only reference counts may free them, so a cycle would fail the test
    try:
        with TargetLayer(model[2]) as layer:
            output = model(IMAGES)
            layer.backward(score_of(output))
        activations = weakref.ref(layer.activations)
        del layer, output
        assert activations() is None
    finally:
        gc.enable()


def test_a_backward_pass_in_another_thread_is_seen_and_a_forward_pass_there_is_not(model: nn.Sequential) -> None:
    activations, expected = expected_of(model, IMAGES, "2")
    with TargetLayer(model[2]) as layer:
        score = score_of(model(IMAGES))
        for work in (lambda: model(IMAGES * 5), score.backward):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    torch.testing.assert_close(layer.activations.detach(), activations)
    torch.testing.assert_close(layer.gradients, expected)


def test_second_derivatives_through_the_pair_are_exact() -> None:
    torch.manual_seed(0)
    head = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3), nn.Softplus(), nn.Linear(3, 2)
    ).double()
    model = nn.Sequential(nn.Conv2d(3, 4, 1).double(), head).eval()
    plain = model[0](IMAGES).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(head(plain)[:, 1].sum(), plain, create_graph=True)
    (expected,) = torch.autograd.grad(gradient.square().sum(), plain)
    with TargetLayer(model[0]) as layer:
        score = model(IMAGES)[:, 1].sum()
        (gradient,) = torch.autograd.grad(score, layer.activations, create_graph=True)
        (second_derivative,) = torch.autograd.grad(gradient.square().sum(), layer.activations)
    assert second_derivative.abs().max() > 0
    torch.testing.assert_close(second_derivative, expected)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("runs", [True, False])
def test_contexts_may_end_in_any_order(model: nn.Sequential, before: bool, runs: bool) -> None:
    with torch.set_grad_enabled(before):
        first, second, third = TargetLayer(model[0]), TargetLayer(model[2]), TargetLayer(model[3])
        for layer in (first, second, third):
            layer.__enter__()
        if runs:
            model(IMAGES)
        for layer in (second, first, third):
            layer.__exit__(None, None, None)
        assert torch.is_grad_enabled() is before  # restored to what the first context saved
        with TargetLayer(model[0]):
            assert not torch.is_grad_enabled()
            with torch.enable_grad(), TargetLayer(model[2]):
                assert not torch.is_grad_enabled()
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled() is before


def run_recorded(
    model: nn.Module, module: nn.Module, earlier_module: nn.Module | None
) -> tuple[TargetLayer, TargetLayer | None, Tensor]:
    """Run one forward pass with a target layer, and perhaps one at an earlier layer; compute the gradients of both."""
    with contextlib.ExitStack() as stack:
        outer = stack.enter_context(TargetLayer(earlier_module)) if earlier_module is not None else None
        inner = stack.enter_context(TargetLayer(module))
        output = model(IMAGES)
        for layer in filter(None, (inner, outer)):
            layer.backward(score_of(output))
    return inner, outer, output


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("old_name_only", [False, True])
@pytest.mark.parametrize(
    ("kind", "by_keyword"),
    [("attribute", False), ("attribute", True), ("function", False), ("function", True), ("container", False)],
)
def test_an_in_place_layer_under_both_its_names(
    kind: str, *, by_keyword: bool, old_name_only: bool, outer: bool
) -> None:
    kinds: dict[str, nn.Module] = {
        "attribute": nn.LeakyReLU(0.3, inplace=True),
        "function": make_module(lambda _, x: F.leaky_relu_(x, 0.3)),  # without an `inplace` attribute
        "container": nn.Sequential(nn.Identity(), nn.LeakyReLU(0.3, inplace=True)),
    }

    def forward(model: Any, images: Tensor) -> Tensor:
        """Use the in-place output by both of its names, or only by the old one, and change it in place again."""
        x = model.before(images)
        name = "input" if isinstance(model.target, nn.LeakyReLU) else "x"
        y = model.target(**{name: x}) if by_keyword else model.target(x)
        y = x if old_name_only else y
        y += 1
        return model.head((y * x.sigmoid()).mean((2, 3)))

    model = make_module(forward, before=convolution(), target=kinds[kind], head=nn.Linear(4, 5))
    layer, before, output = run_recorded(model, model.target, model.before if outer else None)
    assert torch.equal(output, model(IMAGES))
    start = model.before(IMAGES).detach().requires_grad_()
    activations = F.leaky_relu(start, 0.3)
    changed = activations + 1
    score = score_of(model.head((changed * changed.sigmoid()).mean((2, 3))))
    expected, further = torch.autograd.grad(score, [activations, start])
    assert torch.equal(layer.activations, activations)
    torch.testing.assert_close(layer.gradients, expected)
    if before is not None:
        torch.testing.assert_close(before.gradients, further)


@pytest.mark.parametrize("outer", [False, True])
def test_a_block_that_changes_its_input_in_place_and_returns_another(outer: bool) -> None:
    def forward(model: Any, images: Tensor) -> Tensor:
        x = model.before(images)
        return model.head((model.block(x) * x).mean((2, 3)))

    block = make_module(lambda module, x: module.conv(F.relu_(x)), conv=nn.Conv2d(4, 4, 1))
    model = make_module(forward, before=nn.Conv2d(3, 4, 3), block=block, head=nn.Linear(4, 5))
    layer, before, output = run_recorded(model, model.block, model.before if outer else None)
    torch.testing.assert_close(output, model(IMAGES), rtol=0, atol=0)
    start = model.before(IMAGES).detach().requires_grad_()
    rectified = start.relu()
    activations = model.block.conv(rectified)
    score = score_of(model.head((activations * rectified).mean((2, 3))))
    expected, further = torch.autograd.grad(score, [activations, start])
    torch.testing.assert_close(layer.gradients, expected)
    if before is not None:
        torch.testing.assert_close(before.gradients, further)


def test_a_freed_graph_is_reported(model: nn.Sequential) -> None:
    with TargetLayer(model[2]) as layer:
        score = score_of(model(IMAGES))
        score.backward()
        with pytest.raises(ModelError, match="already freed: pass retain_graph=True"):
            layer.backward(score)


@pytest.mark.parametrize("recorded", [False, True])
def test_in_place_layers_that_cannot_be_written_to_are_recorded_all_the_same(recorded: bool) -> None:
    def forward(model: Any, images: Tensor) -> Tensor:
        first, second = model.before(images).split(4, dim=1)  # these are views
        first, second = (first.clone(), second.clone()) if recorded else (first, second)
        return model.head((model.target(first) * second.sigmoid()).mean((2, 3)))

    model = make_module(forward, before=convolution(8), target=nn.ReLU(inplace=True), head=nn.Linear(4, 5))
    with contextlib.ExitStack() as stack:
        if recorded:  # then the output of the earlier layer has a gradient to continue
            stack.enter_context(TargetLayer(model.before))
        layer = stack.enter_context(TargetLayer(model.target))
        gradients = layer.backward(score_of(model(IMAGES)))
    first, second = model.before(IMAGES).detach().split(4, dim=1)
    activations = first.relu().requires_grad_()
    (expected,) = torch.autograd.grad(score_of(model.head((activations * second.sigmoid()).mean((2, 3)))), activations)
    torch.testing.assert_close(gradients, expected)


def test_an_in_place_layer_on_a_frozen_parameter_leaves_no_graph_on_it() -> None:
    model = make_module(
        lambda module, x: module.head((x * module.target(module.weight)).mean((2, 3))), target=nn.ReLU(inplace=True)
    )
    model.head = nn.Linear(3, 5).double()
    model.weight = nn.Parameter(torch.rand(2, 3, 8, 8, dtype=torch.float64), requires_grad=False)
    with TargetLayer(model.target) as layer:
        layer.backward(score_of(model(IMAGES)))
    assert model.weight.is_leaf
    assert not model.weight.requires_grad
    assert layer.gradients.any()


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("rank", [2, 3])
def test_the_gradient_before_a_norm_of_one_channels_last_image_is_that_of_the_channel(images: int, rank: int) -> None:
    """Use the mean of channel 5 after the norm as the score.

    Its gradient is the factor of the norm divided by the number of cells.
    """
    norm = [nn.BatchNorm2d, nn.BatchNorm3d][rank - 2](8)
    norm.running_var.copy_(torch.arange(1.0, 9.0))
    convolution = [nn.Conv2d, nn.Conv3d][rank - 2](3, 8, 1)
    model = nn.Sequential(convolution, norm).eval().requires_grad_(False)
    layout = [torch.channels_last, torch.channels_last_3d][rank - 2]
    pictures = torch.randn(images, 3, *[4] * rank).to(memory_format=layout)
    with TargetLayer(model[0]) as layer:
        score = model(pictures).flatten(2).mean(2)[:, 5].sum()
    gradient = layer.backward(score)
    expected = torch.zeros(images, 8, *[4] * rank)
    expected[:, 5] = 1 / (6.0 + norm.eps) ** 0.5 / 4**rank
    torch.testing.assert_close(gradient, expected)


class TestTraining:
    """Check that a loss inside the context trains only the parameters after the layer."""

    def test_gives_a_warning(self) -> None:
        model = torchvision.models.resnet18(weights=None, num_classes=5)
        with pytest.warns(GradcamWarning, match="'layer4' is in training mode, but no gradient reaches earlier layers"):
            layer = TargetLayer(model.layer4, name="layer4").__enter__()
        model(torch.randn(2, 3, 64, 64)).sum().backward()
        layer.__exit__(None, None, None)
        trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        assert trained == ["fc.weight", "fc.bias"]

    @pytest.mark.parametrize("case", ["evaluation", "frozen", "recording off", "explained"])
    def test_gives_no_warning_without_training(self, case: str) -> None:
        model = small_network().train(case != "evaluation").requires_grad_(case != "frozen")
        with torch.set_grad_enabled(case != "recording off"), warnings.catch_warnings():
            warnings.simplefilter("error")
            if case == "explained":
                gradcam.explain(model, IMAGES, "2", target=1)
            else:
                with TargetLayer(model[2]):
                    model(IMAGES)
