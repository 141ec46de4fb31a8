import pytest
import torch
from torch import Tensor

from gradcam.hooks import autograd as gradients
from gradcam.hooks.autograd import jacobian, list_graph_nodes


class Cube(torch.autograd.Function):
    """A cube whose backward pass cannot be batched by `vmap`."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        if gradient.sum().item() == float("inf"):  # `.item()` cannot be batched
            raise ValueError
        return gradient * 3 * x**2


def test_an_operation_that_cannot_be_batched_is_looped_over() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    (gradients_by_input,) = jacobian(Cube.apply(x), [x], scaled=False)
    for k in range(3):
        expected = torch.zeros(2, 3)
        expected[:, k] = 3 * x[:, k].detach() ** 2
        torch.testing.assert_close(gradients_by_input[0][k], expected)


def test_few_classes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 7, requires_grad=True)
    monkeypatch.setattr(gradients, "MAX_GRADIENT_BYTES", 3 * x.numel() * x.element_size())
    chunks = [gradients_by_input[0] for gradients_by_input in jacobian(x.square(), [x], scaled=False)]
    assert [len(chunk) for chunk in chunks if chunk is not None] == [3, 3, 1]
    tensor = torch.cat([chunk for chunk in chunks if chunk is not None])
    for k in range(7):
        expected = torch.zeros(2, 7)
        expected[:, k] = 2 * x[:, k].detach()
        torch.testing.assert_close(tensor[k], expected)


def test_the_gradient_is_none_without_a_path() -> None:
    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    (gradients_by_input,) = jacobian(x.square(), [x, y], scaled=False)
    assert gradients_by_input[1] is None


@pytest.mark.parametrize("factor", [1e-9, 1.0, 1e5])
def test_scaling_keeps_what_float16_would_lose(factor: float) -> None:
    x = torch.ones(2, 2, dtype=torch.float16, requires_grad=True)
    (gradients_by_input,) = jacobian((x * 2).float() * factor, [x], scaled=True)
    assert gradients_by_input[0].dtype == torch.float32
    torch.testing.assert_close(gradients_by_input[0][1, :, 1], torch.full((2,), 2 * factor), rtol=1e-3, atol=0)


def test_the_largest_scale_without_overflow_is_used() -> None:
    """Check a gradient of 3, which overflows at scale 2**15, beside one of 2**-30, which underflows below 2**10."""
    x = torch.ones(1, 1, dtype=torch.float16, requires_grad=True)
    y = torch.ones(1, 1, dtype=torch.float16, requires_grad=True)
    scores = (3 * x).float() + (y * 2.0**-14).float() * 2.0**-16
    (gradients_by_input,) = jacobian(scores, [x, y], scaled=True)
    assert gradients_by_input[0].item() == 3
    assert gradients_by_input[1].item() == pytest.approx(2.0**-30, rel=1e-2)


def test_all_nodes_of_a_graph_are_listed_once() -> None:
    x = torch.ones(2, requires_grad=True)
    squares = x * x
    total = (squares + squares.sin()).sum()
    names = [type(node).__name__ for node in list_graph_nodes(total)]
    assert names == ["SumBackward0", "AddBackward0", "MulBackward0", "SinBackward0", "AccumulateGrad"]
    assert list_graph_nodes(x) == []
