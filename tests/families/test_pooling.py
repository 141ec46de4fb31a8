"""The pool of CLIP's ResNets: the gradients that it is given another way are those that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import gradcam
from gradcam.targets.text import Text

PICTURES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SENTENCES = torch.randn(5, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.fixture
def model() -> Any:
    library = pytest.importorskip("open_clip")
    vision = {"image_size": 64, "layers": (1, 1, 1, 1), "width": 8, "head_width": 16}
    torch.manual_seed(0)
    found = library.CLIP(12, vision, {"width": 16, "heads": 2, "layers": 1, "context_length": 12})
    for parameter in found.parameters():
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return found.double().eval()


def look(model: Any, pictures: Tensor) -> tuple[Tensor, Tensor]:
    """What the last stage gives, and the cosines, by the model's own pass alone."""
    found: list[Tensor] = []
    handle = model.visual.layer4.register_forward_hook(lambda *args: found.append(args[2]))
    vectors = model.encode_image(pictures.clone().requires_grad_())
    handle.remove()
    units = F.normalize(SENTENCES.to(vectors), dim=1)
    return found[0], vectors / vectors.norm(dim=1, keepdim=True) @ units.T


def slow_maps(activations: Tensor, scores: Tensor) -> Tensor:
    """HiResCAM of scores (N,K), one after another through the model's own graph."""
    rows = []
    for k in range(scores.shape[1]):
        (gradient,) = torch.autograd.grad(scores[:, k].sum(), activations, retain_graph=True)
        rows.append((gradient * activations).sum(1))
    return torch.stack(rows, 1).detach()


def assert_exact(model: Any) -> None:
    activations, scores = look(model, PICTURES)
    expected = slow_maps(activations, scores)
    assert expected.flatten(2).any(2).all()
    found = gradcam.explain(model, PICTURES, method="hirescam", evidence="signed", target=Text(SENTENCES))
    assert found.layer == "visual.layer4"
    torch.testing.assert_close(found.maps.double(), expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())
    torch.testing.assert_close(found.scores, scores.detach().float(), rtol=0, atol=0)


def test_gradients_are_those_of_the_pool(model: Any) -> None:
    assert_exact(model)


def test_second_derivatives_are_those_of_the_pool(model: Any) -> None:
    how: Any = {"method": "shapleycam", "evidence": "signed"}
    found = gradcam.explain(model, PICTURES, "visual.layer4", target=Text(SENTENCES[:2]), **how)
    plain = gradcam.explain(Unknown(model), PICTURES, "inner.visual.layer4", target=score_two, **how)
    torch.testing.assert_close(found.maps, plain.maps, rtol=1e-5, atol=1e-6 * plain.maps.abs().max().item())


class Unknown(torch.nn.Module):
    """A model around the towers, which runs them as a whole."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pictures: Tensor) -> Tensor:
        return self.inner.encode_image(pictures)


def score_two(vectors: Tensor) -> Tensor:
    return F.normalize(vectors, dim=1) @ F.normalize(SENTENCES[:2].to(vectors), dim=1).T


def only_cells(pool: Any, grid: Tensor) -> Tensor:
    """A pool with the same parts, in which the mean asks, and is no answer."""
    cells = grid.flatten(2).permute(2, 0, 1)
    query, places = cells.mean(0, keepdim=True), pool.positional_embedding[1:, None]
    keys = pool.k_proj(cells + places)
    shares = (pool.q_proj(query) * keys).sum(2).softmax(0)
    return pool.c_proj((shares[:, :, None] * pool.v_proj(cells + places)).sum(0))


@pytest.mark.parametrize("other", [only_cells, lambda pool, grid: pool.c_proj(pool.v_proj(grid.mean((2, 3))))])
def test_a_pool_that_does_something_else_stays_as_it_is(model: Any, other: Callable[[Any, Tensor], Tensor]) -> None:
    pool = model.visual.attnpool
    pool.forward = lambda grid: other(pool, grid)
    assert_exact(model)


def test_half_precision_is_rounded_as_the_model_does_it(model: Any) -> None:
    model.bfloat16()
    _, scores = look(model, PICTURES.bfloat16())
    found = gradcam.explain(model, PICTURES.bfloat16(), target=Text(SENTENCES.bfloat16()))
    torch.testing.assert_close(found.scores, scores.detach().float(), rtol=0.02, atol=0.01)
    assert found.maps.any()
