"""Check how often an explanation waits for the device, and that deferred checks work like immediate ones."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradcam
from gradcam.cam.deferred_checks import DeferredChecks
from gradcam.errors import ModelError
from tests.helpers import FunctionModule

# Python methods and PyTorch operations that copy values from a device to the processor.
FUNCTIONS = (
    *("item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "unique", "is_nonzero", "allclose"),
    *("__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__"),
)
OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero")


class Waits(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.is_cpu:
            return False  # Values on the processor may be read one by one. Pretend that all tensors are on a device.
        if getattr(func, "__name__", "") in FUNCTIONS:
            self.found[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in OPERATIONS:
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_waits(call: Callable[[], object]) -> Counter[str]:
    with Operations() as operations, Waits() as waits:
        call()
    return waits.found + operations.found


MODELS = {"resnet18": "layer4", "resnet50": "layer4", "mobilenet_v2": "features.18"}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("images", "target"), [(1, None), (1, 3), (1, [[1, 2, 3]]), (4, None)])
def test_an_explanation_waits_once_for_the_device(name: str, images: int, target: Any) -> None:
    torch.manual_seed(0)
    model, pictures = torchvision.models.get_model(name, weights=None).eval(), torch.rand(images, 3, 64, 64)
    gradcam.explain(model, pictures, MODELS[name], target=target)  # cache the facts about the model first
    waits = count_waits(lambda: gradcam.explain(model, pictures, MODELS[name], target=target))
    assert waits == Counter({"tolist": 1})


@pytest.mark.parametrize("images", [1, 4])
def test_an_explanation_waits_once_if_products_have_few_digits(images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # GPUs may compute products in TensorFloat-32. Then the maps of this model are within reach of the simple limit.
    monkeypatch.setattr("gradcam.cam.forward.RecordedPass.tolerance", 2.0**-8)
    torch.manual_seed(0)
    model, pictures = torchvision.models.mobilenet_v2(weights=None).eval(), torch.rand(images, 3, 64, 64)
    gradcam.explain(model, pictures, "features.18")
    waits = count_waits(lambda: gradcam.explain(model, pictures, "features.18"))
    assert waits == Counter({"tolist": 1})


class AllOperations(Operations):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_batch_takes_few_more_operations_than_one_image() -> None:
    # On a GPU, each operation of a small network takes longer to start than to compute.
    model, counts = torchvision.models.resnet18(weights=None).eval(), list[int]()
    for images in (torch.rand(1, 3, 64, 64), torch.rand(4, 3, 64, 64)):
        gradcam.explain(model, images, "layer4")
        with AllOperations() as operations:
            gradcam.explain(model, images, "layer4")
        counts.append(operations.found.total())
    assert counts[1] - counts[0] <= 40  # The test for dependent images differentiates the scores once more.


def test_count_waits_counts_every_kind() -> None:
    tensor = torch.tensor([1.0, 0.0])
    for call in (tensor.sum().item, tensor.tolist, lambda: bool(tensor.any()), tensor.nonzero):
        assert count_waits(call)


def nan_model(*, in_layer: bool) -> nn.Module:
    """Return a model whose activations or scores are NaN for images with negative values."""

    def forward(module: Any, x: Tensor) -> Tensor:
        pooled = module.layer(x.log() if in_layer else x).mean((2, 3))
        return module.head(pooled if in_layer else pooled + x.flatten(1).log().sum(1, keepdim=True))

    return FunctionModule(forward, layer=nn.Conv2d(1, 2, 1), head=nn.Linear(2, 2)).eval()


@pytest.mark.parametrize(("in_layer", "subject"), [(True, "activations of layer 'layer'"), (False, "scores")])
@pytest.mark.parametrize("method", ["gradcam", "hirescam", "eigencam", "ablationcam"])
def test_the_first_tensor_that_is_not_finite_is_reported(in_layer: bool, subject: str, method: str) -> None:
    with pytest.raises(ModelError, match=f"The {subject} are NaN"):
        gradcam.explain(nan_model(in_layer=in_layer), -torch.ones(1, 1, 4, 4), "layer", target=0, method=method)


def test_nan_is_reported_before_a_method_fails_on_it() -> None:
    @gradcam.method("refusing", summary="fails")
    def refuse(activations: Tensor, gradients: Tensor) -> Tensor:
        raise ValueError("NaN")

    model, images = nan_model(in_layer=True), -torch.ones(1, 1, 4, 4)
    with pytest.raises(ModelError, match="The activations of layer 'layer' are NaN"):
        gradcam.explain(model, images, "layer", target=0, method=refuse)
    with pytest.raises(ValueError, match="NaN"):
        gradcam.explain(model, images.abs(), "layer", target=0, method=refuse)


def test_numbers_of_several_kinds_are_read_at_once_and_judged_in_order() -> None:
    checks, readings = DeferredChecks(), []
    large = torch.tensor([2.0**40 + 1], dtype=torch.float64)  # float32 cannot represent this value
    for numbers in (torch.tensor(True), torch.tensor([[1.5, -2]], dtype=torch.bfloat16), large, torch.tensor([])):
        checks.add(readings.append, numbers)
    waits = count_waits(checks.flush)
    assert readings == [[1.0], [1.5, -2.0], [2.0**40 + 1], []]
    assert waits == Counter({"tolist": 1})
    checks.flush()  # no check runs twice
    assert len(readings) == 4
