"""Compare `inspection.activations` with slow loops, and check that nothing is left on the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

from gradcam.errors import ImageError, LayerError
from gradcam.inspection.channels import activations, measure_strengths, order_channels
from tests.helpers import TINY, assert_same, tiny_model, traces


def record_outputs(model: nn.Module, images: Any, name: str) -> list[Tensor]:
    """Return the layer's output in each of its runs, cloned by a plain hook."""
    results: list[Tensor] = []
    layer = model.get_submodule(name)
    handle = layer.register_forward_hook(lambda module, args, output: results.append(output.clone()))
    with torch.no_grad():
        model.eval()(images)
    handle.remove()
    return results


class FunctionModel(nn.Module):
    """A model whose forward pass is any function of a convolution, a linear layer and the input."""

    def __init__(self, function: Callable[[nn.Module, nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.linear, self.function = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 7), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.conv, self.linear, x)


# Values


def test_outputs_before_any_later_in_place_change() -> None:
    model = tiny_model()
    grids = activations(model, TINY, ["3", "0", "4", "1"])  # an in-place ReLU follows layers 1 and 3
    assert list(grids) == ["3", "0", "4", "1"]
    for name, grid in grids.items():
        assert torch.equal(grid, record_outputs(model, TINY, name)[0])
        assert not grid.requires_grad
    assert (grids["3"] < 0).any()
    assert torch.equal(grids["4"], grids["3"].clamp(min=0))


def test_tokens_become_a_grid_without_the_class_token() -> None:
    vit = torchvision.models.VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16)
    images = torch.randn(2, 3, 32, 32)
    name = "encoder.layers.encoder_layer_1"
    tokens = record_outputs(vit, images, name)[0]
    grid = activations(vit, images, name)[name]
    assert grid.shape == (2, 8, 4, 4)
    cells = [[tokens[:, 1 + 4 * i + j] for j in range(4)] for i in range(4)]
    for i in range(4):
        for j in range(4):
            torch.testing.assert_close(grid[:, :, i, j], cells[i][j])


def test_the_models_patches_tell_the_grid_that_tokens_form() -> None:
    # The last two rows and columns of the image are dropped.
    cut = nn.Sequential(nn.Conv2d(3, 5, 7, stride=7), nn.Flatten(2))

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut, self.norm = cut, nn.LayerNorm(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.cut(x).mT).mean(1)

    images = torch.randn(1, 3, 30, 30)
    grid = activations(Tokens(), images, "norm")["norm"]
    assert grid.shape == (1, 5, 4, 4)
    assert torch.equal(grid[0, :, 2, 1], record_outputs(Tokens(), images, "norm")[0][0, 9])


def test_channels_that_come_last_come_first() -> None:
    model = FunctionModel(lambda conv, linear, x: linear(conv(x).movedim(1, 3)).mean((1, 2)))
    grid = activations(model, TINY, "linear")["linear"]
    assert grid.shape == (3, 7, 12, 16)
    last = record_outputs(model, TINY, "linear")[0]
    for c in range(7):
        assert torch.equal(grid[:, c], last[:, :, :, c])


def test_reshape_arranges_the_tokens() -> None:
    model = FunctionModel(lambda conv, linear, x: linear(conv(x).flatten(2).mT).mean(1))
    tokens = record_outputs(model, TINY, "linear")[0]  # (N,192,7)
    by_grid = activations(model, TINY, "linear", reshape=(12, 16))["linear"]
    by_function = activations(model, TINY, "linear", reshape=lambda item: item.mT.unflatten(2, (6, 32)))["linear"]
    assert torch.equal(by_grid[1, 2, 3], tokens[1, 48:64, 2])
    assert torch.equal(by_function[1, 2, 3], tokens[1, 96:128, 2])
    with pytest.raises(LayerError, match=r"reshape=\(5, 5\) does not fit"):
        activations(model, TINY, "linear", reshape=(5, 5))
    with pytest.raises(LayerError, match="reshape is 'rows', expected the token grid"):
        activations(model, TINY, "linear", reshape="rows")


def test_volumes_keep_their_rank() -> None:
    model = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.Flatten())
    volumes = torch.randn(2, 1, 4, 6, 8)
    assert torch.equal(activations(model, volumes, "0")["0"], record_outputs(model, volumes, "0")[0])


def test_a_pattern_selects_layers_with_a_grid() -> None:
    # Without the pooled and flat outputs.
    assert list(activations(tiny_model(), TINY, "*")) == ["0", "1", "2", "3", "4"]
    assert list(activations(tiny_model(), TINY, ["[48]", "0", "4"])) == ["4", "0"]
    flat_first = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (3, 12, 16)), nn.Conv2d(3, 2, 1))
    assert list(activations(flat_first, TINY, "*")) == ["1", "2"]


def test_values_keep_their_precision_and_nan_is_no_error() -> None:
    model = tiny_model().to(torch.bfloat16)
    images = TINY.to(torch.bfloat16)
    images[0, 0, 0, 0] = float("nan")
    grid = activations(model, images, "0")["0"]
    assert grid.dtype == torch.bfloat16
    assert grid[0, :, 0, 0].isnan().all()
    assert grid[1].isfinite().all()


def test_layers_may_be_modules_and_images_a_dict() -> None:
    model = tiny_model()
    by_module = activations(model, {"input": TINY}, [model[0], model[3]])
    assert list(by_module) == ["0", "3"]
    assert torch.equal(by_module["0"], activations(model, (TINY,), "0")["0"])
    assert list(activations(model, TINY, iter(["3"]))) == ["3"]
    assert list(activations(model, TINY, model[3])) == ["3"]


# Strength and order


def test_strength_is_the_mean_absolute_activation() -> None:
    maps = np.array([[[1, -3], [0, 0]], [[2, 2], [2, 2]], [[0, 0], [0, 0]]], np.float32)
    assert measure_strengths(maps).tolist() == [1, 2, 0]
    huge = np.full((1, 4, 4), 60000, np.float16)
    assert measure_strengths(huge).tolist() == [60000]  # float16 cannot represent the sum


def test_nan_comes_first_and_then_the_strongest() -> None:
    strengths = np.array([1, 3, float("nan"), 3, 0, float("inf")])
    assert order_channels(strengths) == [2, 5, 1, 3, 0, 4]
    assert order_channels(strengths, "index") == [0, 1, 2, 3, 4, 5]


# Errors


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("8", r"'8' returns \(3, 5\).*no spatial grid: choose a layer before pooling.*`gradcam inspect features`"),
        (["0", "5"], r"'5' returns \(3, 6, 1, 1\).*no spatial grid"),
        ("[5678]", r"'5' returns \(3, 6, 1, 1\).*no spatial grid"),
        ("9", "There is no layer '9'"),
        ("x*", r"No layer matches 'x\*'"),
        ([], "The layers are"),
        (None, "None"),
        (["0", 3], "The layer is 3, expected a dotted name"),
    ],
)
def test_wrong_layer_names_are_errors(layers: Any, message: str) -> None:
    with pytest.raises(LayerError, match=message):
        activations(tiny_model(), TINY, layers)


def test_wrong_images_are_errors() -> None:
    with pytest.raises(ImageError, match=r"expected a floating-point tensor \(N,C,H,W\)"):
        activations(tiny_model(), TINY[0], "0")


# Nothing is left on the model


def test_nothing_stays_where_a_layer_has_no_grid_and_in_inference_mode() -> None:
    model = tiny_model().train()
    before = traces(model)
    with pytest.raises(LayerError):
        activations(model, TINY, ["0", "8"])
    assert_same(before, traces(model))
    with torch.inference_mode():
        before = traces(model)
        grid = activations(model, TINY.clone(), "0")["0"]
        assert_same(before, traces(model))
    assert torch.equal(grid, activations(model, TINY, "0")["0"])
