"""Check gradients, and the effect of edits, in small networks where both can be worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gradcam.hooks.hooks import Hooks
from gradcam.inspection import edit_gradients
from gradcam.inspection.selection import follow_layers


@pytest.mark.parametrize(
    ("removed", "expected"), [("never", (112, 10, 30, 20)), ("before", (112, 8, 24, 16)), ("after", (112, 10, 30, 20))]
)
def test_edits_of_a_chain_of_products(removed: str, expected: tuple[float, ...]) -> None:
    """Work out e = c d, c = a b: 2 at e, 2 * 6 + 100 at d, 2 * 4 + 2 at c; at a and b, that times the other."""
    a, b, d = (torch.tensor(value, requires_grad=True) for value in (2.0, 3.0, 4.0))
    c = a * b
    edit = edit_gradients(c, lambda gradient: gradient + 2)
    edit_gradients(d, lambda gradient: gradient + 100)
    e = c * d
    edit_gradients(e, lambda gradient: 2 * gradient)
    c.retain_grad()
    if removed == "before":
        edit.remove()
    e.backward(torch.tensor(1.0))
    if removed == "after":
        edit.remove()
    assert [item.grad.item() for item in (d, c, a, b)] == list(expected)


@pytest.mark.parametrize("factor", [1, 2])
def test_an_edit_inside_a_sum_reaches_its_parts_alone(factor: int) -> None:
    x, y, w = (torch.tensor(value, requires_grad=True) for value in (2.0, 3.0, 4.0))
    z = x + y
    z.retain_grad()
    if factor == 2:
        edit_gradients(z, lambda gradient: 2 * gradient)
    (w * z).backward()
    assert [item.grad.item() for item in (x, y, w, z)] == [4 * factor, 4 * factor, 5, 4 * factor]


def two_layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    weights = [[1, 2, 3], [-4, -5, -6], [7, 8, 9], [-10, -11, -12]]
    values = [weights, [1, 2, 3, 4], [[1, 2, 3, 4]], [1]]
    for parameter, value in zip(model.parameters(), values):
        parameter.data = torch.tensor(value, dtype=torch.float32)
    return model


def test_two_layers_and_a_relu_in_place() -> None:
    model, images = two_layers(), torch.ones(1, 3, requires_grad=True)
    activations: dict[str, list[float]] = {}
    gradients: dict[str, list[float]] = {}

    def look(name: str, tensor: Tensor):
        activations[name] = tensor[0].tolist()
        return lambda gradient: gradients.__setitem__(name, gradient[0].tolist())

    with Hooks() as hooks:
        follow_layers(hooks, {name: model.get_submodule(name) for name in "012"}, look)
        model(images).backward()
    assert activations == {"0": [7, -13, 27, -29], "1": [7, 0, 27, 0], "2": [89]}
    assert gradients == {"0": [1, 0, 3, 0], "1": [1, 2, 3, 4], "2": [1]}
    assert images.grad.tolist() == [[22, 26, 30]]
