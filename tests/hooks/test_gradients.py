import pytest
import torch
from torch import Tensor

from gradcam.hooks import autograd as gradients
from gradcam.hooks.autograd import jacobian


class Cube(torch.autograd.Function):
    """An operation without a rule for batched gradients."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        if gradient.sum().item() == float("inf"):  # .item() is what cannot be batched
            raise ValueError
        return gradient * 3 * x**2


def test_an_operation_that_cannot_be_batched_is_looped_over() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    (actual,) = jacobian(Cube.apply(x), [x], scaled=False)
    assert actual[0] is not None
    for k in range(3):
        expected = torch.zeros(2, 3)
        expected[:, k] = 3 * x[:, k].detach() ** 2
        torch.testing.assert_close(actual[0][k], expected)


def test_few_classes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 7, requires_grad=True)
    monkeypatch.setattr(gradients, "MOST_BYTES", 3 * x.numel() * x.element_size())
    chunks = [actual[0] for actual in jacobian(x.square(), [x], scaled=False)]
    assert [len(chunk) for chunk in chunks if chunk is not None] == [3, 3, 1]
    tensor = torch.cat([chunk for chunk in chunks if chunk is not None])
    for k in range(7):
        expected = torch.zeros(2, 7)
        expected[:, k] = 2 * x[:, k].detach()
        torch.testing.assert_close(tensor[k], expected)


def test_none_where_no_path_leads() -> None:
    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    (actual,) = jacobian(x.square(), [x, y], scaled=False)
    assert actual[0] is not None
    assert actual[1] is None


@pytest.mark.parametrize("factor", [1e-9, 1.0, 1e5])
def test_scaling_keeps_what_float16_would_lose(factor: float) -> None:
    x = torch.ones(2, 2, dtype=torch.float16, requires_grad=True)
    (actual,) = jacobian((x * 2).float() * factor, [x], scaled=True)
    assert actual[0] is not None
    assert actual[0].dtype == torch.float32
    torch.testing.assert_close(actual[0][1, :, 1], torch.full((2,), 2 * factor), rtol=1e-3, atol=0)


def test_the_largest_scale_that_does_not_overflow_is_taken() -> None:
    """A gradient of 3 overflows when scaled by 2**15; one of 2**-30 is lost unless it is scaled by 2**10 at least."""
    x = torch.ones(1, 1, dtype=torch.float16, requires_grad=True)
    y = torch.ones(1, 1, dtype=torch.float16, requires_grad=True)
    scores = (3 * x).float() + (y * 2.0**-14).float() * 2.0**-16
    (actual,) = jacobian(scores, [x, y], scaled=True)
    assert actual[0] is not None
    assert actual[1] is not None
    assert actual[0].item() == 3
    assert actual[1].item() == pytest.approx(2.0**-30, rel=1e-2)
