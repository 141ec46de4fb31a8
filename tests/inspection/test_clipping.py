"""Compare clipping by hooks with torch.nn.utils applied to each parameter separately."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from gradcam.errors import GradientError
from gradcam.inspection.edit import clip_gradients, edit_gradients
from tests.helpers import TINY, assert_same, tiny_model, traces


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(TINY).pow(2).sum().backward()
    return {name: item.grad.clone() for name, item in model.named_parameters()}


def clip_gradient(gradient: Tensor, limit: float, **options: Any) -> Tensor:
    """Return the gradient of a parameter after clipping."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    model = nn.Module()
    model.register_parameter("weight", weight)
    with clip_gradients(model, limit, **options):
        weight.backward(gradient)
    return weight.grad


@pytest.mark.parametrize("norm", [None, 1.0, 2.0, 3, math.inf])
@pytest.mark.parametrize("limit", [1e-3, 0.05, 1])
def test_each_parameter_by_itself(norm: float | None, limit: float) -> None:
    model = tiny_model().eval()
    plain = gradients(model)
    with clip_gradients(model, limit, norm=norm):
        clipped_gradients = gradients(model)
    changed = 0
    for name, gradient in plain.items():
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        if norm is None:
            clip_grad_value_(parameter, limit)
        else:
            clip_grad_norm_(parameter, limit, norm)
        # `clip_grad_norm_` adds 1e-6 to the norm.
        torch.testing.assert_close(clipped_gradients[name], parameter.grad, rtol=1e-4, atol=1e-9)
        changed += not torch.equal(clipped_gradients[name], gradient)
        if norm is None:
            assert clipped_gradients[name].abs().max() <= limit
        elif torch.linalg.vector_norm(gradient, norm) <= limit:
            assert torch.equal(clipped_gradients[name], gradient)
        else:
            clipped_norm = torch.linalg.vector_norm(clipped_gradients[name].double(), norm).item()
            assert clipped_norm == pytest.approx(limit, rel=1e-6)
    assert changed > 0
    assert_same(gradients(model), plain)


def test_numbers_by_hand() -> None:
    gradient = torch.tensor([3.0, -4.0])
    assert clip_gradient(gradient, 2).tolist() == [2, -2]
    assert clip_gradient(gradient, 2.5, norm=2).tolist() == [1.5, -2]
    assert clip_gradient(gradient, 3.5, norm=1).tolist() == [1.5, -2]
    assert clip_gradient(gradient, 2, norm=math.inf).tolist() == [1.5, -2]
    assert clip_gradient(gradient, 5, norm=2).tolist() == [3, -4]
    assert clip_gradient(torch.zeros(2), 5, norm=2).tolist() == [0, 0]


def test_the_gradient_of_each_backward_pass_is_clipped_and_not_the_sum() -> None:
    model = nn.Linear(1, 1, bias=False)
    with clip_gradients(model, 2):
        for value in (5.0, 1.0, -7.0):
            model(torch.tensor([[value]])).sum().backward()
        assert model.weight.grad.item() == 2 + 1 - 2


def test_chosen_parameters_and_the_order_of_edits() -> None:
    model = tiny_model().eval()
    plain = gradients(model)
    with (
        edit_gradients(model, lambda gradient: gradient * 100, parameters="8.bias"),
        clip_gradients(model, 0.5, parameters="8.*"),
        edit_gradients(model, lambda gradient: gradient + 3, parameters="8.bias"),
    ):
        edited = gradients(model)
    for name, gradient in plain.items():
        expected = gradient.clamp(-0.5, 0.5) if name == "8.weight" else gradient
        expected = (gradient * 100).clamp(-0.5, 0.5) + 3 if name == "8.bias" else expected
        assert torch.equal(edited[name], expected), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    gradient = torch.linspace(-60000, 60000, 4096).to(dtype)  # float16 can represent neither its norm nor its squares
    exact = gradient.double()
    for norm in (1.0, 2.0, math.inf):
        result = clip_gradient(gradient, 0.25, norm=norm)
        assert result.dtype == dtype
        expected = exact * 0.25 / torch.linalg.vector_norm(exact, norm)
        torch.testing.assert_close(result, expected.to(dtype))
    assert clip_gradient(gradient, 0.25).abs().max() == 0.25
    assert torch.equal(clip_gradient(gradient, 1e30), gradient)
    assert torch.equal(clip_gradient(gradient, 1e30, norm=2), gradient)


def test_large_values_whose_squares_overflow() -> None:
    result = clip_gradient(torch.tensor([3e30, -4e30]), 1.0, norm=2)
    torch.testing.assert_close(result, torch.tensor([0.6, -0.8]))


@pytest.mark.parametrize("norm", [None, 2.0, math.inf])
def test_nan_stays_nan(norm: float | None) -> None:
    result = clip_gradient(torch.tensor([math.nan, 3.0]), 1, norm=norm)
    assert result[0].isnan()
    assert result[1].item() == 1 if norm is None else result[1].isnan()


def test_infinity() -> None:
    gradient = torch.tensor([math.inf, -math.inf, 3.0])
    assert clip_gradient(gradient, 1).tolist() == [1, -1, 1]
    scaled = clip_gradient(gradient, 1, norm=2)
    assert scaled.isnan().tolist() == [True, True, False]
    assert scaled[2] == 0


@pytest.mark.parametrize("norm", [None, 2.0])
def test_sparse_gradients(norm: float | None) -> None:
    dense, sparse = nn.Embedding(5, 2), nn.Embedding(5, 2, sparse=True)
    for table in (dense, sparse):
        with clip_gradients(table, 1.5, norm=norm):
            table(torch.tensor([1, 1, 2])).pow(0).sum().backward()
            table.weight.grad = None
            (3 * table(torch.tensor([1, 1, 2]))).sum().backward()
    assert sparse.weight.grad.is_sparse
    torch.testing.assert_close(sparse.weight.grad.to_dense(), dense.weight.grad)
    assert dense.weight.grad.any()


def test_nothing_at_all() -> None:
    for norm in (None, 2.0, math.inf):
        assert clip_gradient(torch.zeros(0, 3), 1, norm=norm).shape == (0, 3)


def test_complex_gradients() -> None:
    gradient = torch.tensor([3 - 4j])
    assert clip_gradient(gradient, 2).tolist() == [2 - 2j]
    assert clip_gradient(gradient, 2.5, norm=2).tolist() == [1.5 - 2j]


def test_second_derivatives() -> None:
    """Compare second derivatives with those of the scaling written out, also where the gradient is zero."""
    for values in ([0.3, -0.4], [0.01, 0.02], [0.0, 0.0]):
        weight = nn.Parameter(torch.tensor(values, dtype=torch.float64))
        model = nn.Module()
        model.register_parameter("weight", weight)
        with clip_gradients(model, 0.25, norm=2):
            (gradient,) = torch.autograd.grad(weight.pow(2).sum(), weight, create_graph=True)
        plain = 2 * weight
        size = plain.pow(2).sum().add(1e-300).sqrt()
        expected = plain * (0.25 / size) if size > 0.25 else plain * 1
        torch.testing.assert_close(gradient, expected)
        sums = [(values * torch.tensor([1.0, 2.0])).sum() for values in (gradient, expected)]
        torch.testing.assert_close(*(torch.autograd.grad(total, weight)[0] for total in sums))


@pytest.mark.parametrize("limit", [0, -1, math.nan, math.inf, True, "1", None, torch.tensor(1.0), np.float64(-1)])
def test_wrong_limits_are_errors(limit: Any) -> None:
    model = tiny_model()
    before = traces(model)
    with pytest.raises(GradientError, match="The limit is .*, expected a positive, finite number"):
        clip_gradients(model, limit)
    assert_same(traces(model), before)


@pytest.mark.parametrize("norm", [0, -2, math.nan, True, "2", -math.inf])
def test_wrong_norms_are_errors(norm: Any) -> None:
    with pytest.raises(GradientError, match="The norm is .*, expected a positive number such as 2.0, math.inf"):
        clip_gradients(tiny_model(), 1, norm=norm)


def test_wrong_parameters_are_errors() -> None:
    with pytest.raises(GradientError, match="No gradient reaches"):
        clip_gradients(tiny_model().requires_grad_(False), 1)
    with pytest.raises(GradientError, match="No parameter matches 'x.'"):
        clip_gradients(tiny_model(), np.float32(1), parameters="x*")


def test_the_handle() -> None:
    model = nn.Linear(1, 1)
    edit = clip_gradients(model, 0.5)
    assert repr(edit) == "Edit(parameter 'weight', parameter 'bias'; active)"
    model(torch.ones(1, 1)).sum().backward()
    assert model.bias.grad.item() == 0.5
    edit.remove()
    model.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    assert model.bias.grad.item() == 1
