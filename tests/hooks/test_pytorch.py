"""Check the module that owns everything PyTorch may change, and that no other module uses PyTorch's private names."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradcam
from gradcam.cam.forward import caller_autocast
from gradcam.hooks import pytorch
from gradcam.hooks.preserve import preserve_state
from tests.helpers import tiny_model

PACKAGE = Path(gradcam.__file__).parent
# Private modules and functions, names of autograd nodes, and checks of error messages.
PRIVATE = re.compile(
    r"\btorch\._[a-z]|\btorch\._C\b|_use_count|\._is_view\(|\._base\b|_saved_[a-z]|_forward_cls|_wrapped_node|"
    r"_compiled_call_impl|Backward0|\w+Backward\b(?=['\"])|\.name\(\)\.lower\(\)|_execution_engine|set_stance|"
    r"\btorch\.accelerator|\btorch\.autocast\(|set_fastpath_enabled"
)
# Exceptions: modules that are looked up but not imported, and an operator's name.
ALLOWED = {("cli/_process.py", "torch._d"), ("cli/_process.py", "torch._dynamo")}


def test_no_other_module_uses_private_names_of_pytorch() -> None:
    names = {
        (path.relative_to(PACKAGE).as_posix(), match[0])
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "hooks/pytorch.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        for match in PRIVATE.finditer(line)
    }
    assert names - ALLOWED == set()


X = torch.randn(2, 3, 8, 8)


def run(function: object) -> Tensor:
    return function(X.clone().requires_grad_() * 1)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x.flatten(1).softmax(1), "softmax"), (lambda x: x.sigmoid().flatten(1)[:, :2], "sigmoid"),
        (lambda x: x.flatten(1).log_softmax(1), "log_softmax"), (lambda x: x.flatten(1) @ torch.ones(192, 2), "linear"),
        (lambda x: F.linear(x.flatten(1), torch.ones(2, 192), torch.ones(2)), "linear"),
        (lambda x: F.conv2d(x, torch.ones(2, 3, 8, 8)).squeeze(), "linear"), (lambda x: x.mean((2, 3)) + 1, ""),
    ],
)  # fmt: skip
def test_the_last_operation_is_named(function: object, name: str) -> None:
    assert pytorch.find_last_operation(run(function)) == name
    assert pytorch.find_last_operation(X) == ""


@pytest.mark.parametrize(
    ("function", "activates"),
    [
        (F.relu, True), (F.gelu, True), (F.silu, True), (F.hardswish, True), (lambda x: x.clamp(min=0), True),
        (lambda x: F.leaky_relu(x, 0.01), True), (lambda x: F.leaky_relu(x, 0.5), False), (F.relu6, True),
        (lambda x: x.clamp(min=-1), False), (torch.tanh, False), (lambda x: x + 1, False), (lambda x: x.softmax(1), True),
    ],
)  # fmt: skip
def test_activation_functions_are_recognised(function: object, activates: bool) -> None:
    assert pytorch.is_activation(run(function).grad_fn) is activates


@pytest.mark.parametrize(
    ("function", "is_relu"),
    [
        (F.relu, True), (F.relu6, True), (lambda x: x.clamp(min=0), True), (lambda x: x.clamp(0, 6), True),
        (lambda x: x.clamp(0, 1), False), (lambda x: F.threshold(x, 0, 0), True), (lambda x: F.threshold(x, 1, 0), False),
        (F.gelu, False),
    ],
)  # fmt: skip
def test_relus_are_recognised(function: object, is_relu: bool) -> None:
    assert pytorch.is_relu(run(function).grad_fn) is is_relu


def test_weights_tokens_and_pools_are_recognised() -> None:
    convolution, grouped = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3, groups=3)
    assert pytorch.mixes_all_channels(run(convolution).grad_fn)
    assert not pytorch.mixes_all_channels(run(grouped).grad_fn)
    assert pytorch.has_weights(run(grouped).grad_fn)
    enlarged = run(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")).grad_fn
    assert not pytorch.mixes_all_channels(enlarged)
    assert pytorch.is_adaptive_pool(run(lambda x: F.adaptive_avg_pool2d(x, 2)).grad_fn)
    assert not pytorch.is_adaptive_pool(run(lambda x: F.avg_pool2d(x, 2)).grad_fn)
    attention = run(lambda x: F.scaled_dot_product_attention(x, x, x)).grad_fn
    assert pytorch.is_attention_operation(attention)
    assert pytorch.mixes_tokens(attention)
    assert not pytorch.mixes_tokens(run(F.relu).grad_fn)
    assert pytorch.is_softmax(run(lambda x: x.softmax(3)).grad_fn, 4)
    assert not pytorch.is_softmax(run(lambda x: x.softmax(1)).grad_fn, 4)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x[:, 2], range(2, 3)), (lambda x: x[:, -1], range(2, 3)), (lambda x: x[:, 1:], range(1, 3)),
        (lambda x: x.narrow(1, 0, 2), range(2)), (lambda x: x * 2, None),
    ],
)  # fmt: skip
def test_selections_are_read(function: object, expected: range | None) -> None:
    selection = pytorch.read_selection(run(function).grad_fn)
    assert (selection and (tuple(selection[0]), selection[1], selection[2])) == (
        expected and ((2, 3, 8, 8), 1, expected)
    )


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_functions_written_in_python_are_recognised() -> None:
    output = run(Double.apply)
    node = output.grad_fn
    assert pytorch.is_python_function(node)
    assert pytorch.get_function_name(node) == "Double"
    assert not pytorch.is_python_function(run(F.relu).grad_fn)
    assert pytorch.may_cast(run(lambda x: x.half()).grad_fn)
    assert not pytorch.may_cast(run(F.relu).grad_fn)


@pytest.mark.parametrize(
    ("function", "inputs", "keeps"),
    [
        (lambda x: F.avg_pool2d(x, 2), 1, True), (lambda x: x.flatten(1), 1, True), (lambda x: x.mT, 1, True),
        (lambda x: x[:, :2], 1, True), (lambda x: torch.cat([x, x]), 2, True), (lambda x: x + x, 2, True),
        (lambda x: x + 1, 1, False), (lambda x: x * x, 2, True), (lambda x: x - x, 2, False), (torch.tanh, 1, False),
        (nn.Conv2d(3, 2, 3), 3, False),
    ],
)  # fmt: skip
def test_operations_that_keep_values_nonnegative_are_recognised(function: object, inputs: int, keeps: bool) -> None:
    assert pytorch.keeps_nonnegative(run(function).grad_fn, inputs) is keeps


def test_copies_are_recognised() -> None:
    assert pytorch.is_copy(run(torch.clone).grad_fn)
    assert pytorch.is_passthrough(run(torch.clone).grad_fn)
    copied = torch.zeros(2, 3, 8, 8).copy_(run(F.relu))
    assert pytorch.is_overwriting_copy(copied.grad_fn)
    assert not pytorch.is_overwriting_copy(run(torch.clone).grad_fn)


def test_a_compiled_part_runs_uncompiled() -> None:
    traced: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        traced.append(1)
        return graph

    model = tiny_model().eval()
    layer = next(name for name, module in model.named_modules() if isinstance(module, nn.Conv2d))
    expected = gradcam.explain(model, X, layer, target=0).maps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outer = nn.Sequential(torch.compile(model, backend=backend))
        maps = gradcam.explain(outer, X, f"0._orig_mod.{layer}", target=0).maps
    assert traced == []
    torch.testing.assert_close(maps, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outer(X)
    assert traced == [1]  # the compiled code is used again, without another trace


def test_hooks_see_pytorchs_own_encoder() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    calls: list[str] = []
    for name in ("linear1", "self_attn"):
        getattr(layer, name).register_forward_hook(lambda *_, name=name: calls.append(name))
    with preserve_state(layer), torch.no_grad():
        layer(torch.randn(2, 5, 8))
    assert calls == ["self_attn", "linear1"]


def test_autocast_is_switched_off_and_on_again() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert caller_autocast("cpu") == torch.bfloat16
        with pytorch.without_autocast("cpu"):
            assert caller_autocast("cpu") is None
    with pytorch.autocast("cpu", torch.bfloat16):
        assert (X[0, 0] @ X[0, 0]).dtype == torch.bfloat16
    with pytorch.without_autocast("mps"):
        assert caller_autocast("mps") is None


def test_a_score_is_differentiated_at_leaves() -> None:
    leaf, unused = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    gradients = pytorch.differentiate_edges((leaf * 3).sum(), [pytorch.find_edge(item) for item in (leaf, unused)])
    torch.testing.assert_close(gradients[0], torch.full((3,), 3.0))
    assert gradients[1] is None


def test_parts_of_an_error_are_searched_regardless_of_case() -> None:
    error = RuntimeError("CUDA error: Out of Memory")
    assert pytorch.message_contains(error, ["no such text", "out of memory"])
    assert not pytorch.message_contains(error, ["no such text", "device mismatch"])
