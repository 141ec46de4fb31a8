"""Check that models of well-known classes are not tested for images that depend on one another, and others are."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradcam
from gradcam.hooks.known_classes import process_images_alone
from tests.helpers import FunctionModule

IMAGES = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def build_resnet() -> Any:
    torch.manual_seed(0)
    return torchvision.models.resnet18(weights=None).eval()


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


class Subclass(torchvision.models.ResNet):
    """A class outside torchvision."""


@pytest.mark.parametrize(("is_known", "passes"), [(True, 1), (False, 1 + len(IMAGES))])
def test_the_first_call_runs_the_images_alone_only_if_the_classes_are_unknown(is_known: bool, passes: int) -> None:
    model = build_resnet()
    model.__class__ = type(model) if is_known else Subclass
    with Operations() as operations:
        gradcam.explain(model, IMAGES, "layer4", target=3)
    assert operations.counts["convolution"] == 20 * passes


def mix(x: Tensor) -> Tensor:
    return x - 0.5 * x.mean(0, keepdim=True)


def change_module(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.maxpool = FunctionModule(lambda _, x: mix(nn.functional.max_pool2d(x, 3, 2, 1)))


def change_forward(model: Any, patch: pytest.MonkeyPatch) -> None:
    forward = model.layer1.forward
    model.layer1.forward = lambda x: mix(forward(x))


def change_other_function(model: Any, patch: pytest.MonkeyPatch) -> None:
    forward = model._forward_impl
    model._forward_impl = lambda x: forward(mix(x))


def change_call(model: Any, patch: pytest.MonkeyPatch) -> None:
    call = model.layer2._call_impl
    model.layer2._call_impl = lambda x: call(mix(x))


def add_hook(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.layer1.register_forward_hook(lambda module, args, output: mix(output))


def add_pre_hook(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.layer2.register_forward_pre_hook(lambda module, args: (mix(args[0]),))


def change_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    forward = torchvision.models.ResNet._forward_impl
    patch.setattr(torchvision.models.ResNet, "_forward_impl", lambda module, x: forward(module, mix(x)))


def change_base_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    forward = nn.modules.batchnorm._BatchNorm.forward
    patch.setattr(nn.modules.batchnorm._BatchNorm, "forward", lambda module, x: mix(forward(module, x)))


class Mixing:
    def __call__(self, x: Tensor) -> Tensor:
        return mix(nn.functional.max_pool2d(x, 3, 2, 1))


def change_class_to_an_object(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.MaxPool2d, "forward", Mixing())


def move_the_batch_axis(model: Any, patch: pytest.MonkeyPatch) -> None:
    swap, pool = torchvision.ops.Permute([2, 1, 0, 3]), nn.AvgPool2d((3, 1), stride=1, padding=(1, 0))
    model.maxpool = nn.Sequential(model.maxpool, swap, pool, swap)


def remove_running_statistics(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.bn1 = nn.BatchNorm2d(64, track_running_stats=False)


CHANGES = [
    *(change_module, change_forward, change_other_function, change_call, add_hook, add_pre_hook),
    *(change_class, change_base_class, change_class_to_an_object, move_the_batch_axis),
    remove_running_statistics,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_tested(change: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_resnet()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradcam.explain(model, IMAGES, "layer4", target=3)
    change(model, monkeypatch)
    with pytest.warns(gradcam.GradcamWarning, match="depend on one another"):
        gradcam.explain(model, IMAGES, "layer4", target=3)


@pytest.fixture
def global_hook() -> Iterator[None]:
    def change(module: nn.Module, args: Any, output: Any) -> Any:
        return mix(output) if isinstance(module, nn.MaxPool2d) else None

    handle = nn.modules.module.register_module_forward_hook(change)
    yield
    handle.remove()


@pytest.mark.usefixtures("global_hook")
def test_a_model_is_tested_if_there_is_a_hook_on_all_modules() -> None:
    with pytest.warns(gradcam.GradcamWarning, match="depend on one another"):
        gradcam.explain(build_resnet(), IMAGES, "layer4", target=3)


@pytest.mark.parametrize(
    "module",
    [
        *(
            nn.Flatten(0),
            nn.Flatten(-3),
            nn.LayerNorm([4, 8]),
            nn.MultiheadAttention(8, 2),
            nn.Softmax(0),
            nn.LSTM(8, 8),
        ),
        torchvision.ops.Permute([1, 0, 2, 3]),
        *(Subclass(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1]), nn.utils.spectral_norm(nn.Linear(2, 2))),
    ],
)
def test_modules_that_may_combine_images_are_unknown(module: nn.Module) -> None:
    assert not process_images_alone([*nn.Sequential(nn.Conv2d(3, 8, 3), module).modules()])


NAMES = ("mobilenet_v3_small", "shufflenet_v2_x0_5", "densenet121", "convnext_tiny", "vit_b_16", "swin_t", "swin_v2_t")
TIMM_NAMES = ("resnet10t", "vit_tiny_patch16_224", "convnext_atto", "levit_128s", "mixer_s32_224", "edgenext_xx_small")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, *(f"timm {name}" for name in TIMM_NAMES)])
def test_known_models_process_each_image_alone(name: str) -> None:
    torch.manual_seed(0)
    create: Any = torchvision.models.get_model
    if name.startswith("timm "):
        create = pytest.importorskip("timm").create_model
    model, images = create(name.removeprefix("timm ")).eval(), torch.randn(3, 3, 224, 224)
    images[2] *= 5
    assert process_images_alone([*model.modules()])
    with torch.no_grad():
        alone = torch.cat([model(image[None]) for image in images])
        torch.testing.assert_close(model(images), alone, rtol=1e-3, atol=1e-4 * alone.abs().max().item())
