"""Test the attention pool of CLIP's ResNets: gradients by the short cut equal those of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import gradcam
from gradcam.adapters.pooling import pool_by_attention
from gradcam.targets.text import Text

PICTURES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SENTENCES = torch.randn(5, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.fixture
def model() -> Any:
    library = pytest.importorskip("open_clip")
    vision = {"image_size": 64, "layers": (1, 1, 1, 1), "width": 8, "head_width": 16}
    torch.manual_seed(0)
    actual = library.CLIP(12, vision, {"width": 16, "heads": 2, "layers": 1, "context_length": 12})
    for parameter in actual.parameters():
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return actual.double().eval()


def look(model: Any, pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of the last stage and the cosines, from the model's own forward pass."""
    results: list[Tensor] = []
    handle = model.visual.layer4.register_forward_hook(lambda *args: results.append(args[2]))
    vectors = model.encode_image(pictures.clone().requires_grad_())
    handle.remove()
    units = F.normalize(SENTENCES.to(vectors), dim=1)
    return results[0], vectors / vectors.norm(dim=1, keepdim=True) @ units.T


def slow_maps(activations: Tensor, scores: Tensor, method: str) -> Tensor:
    """Compute maps of scores (N,K) one by one through the graph of the model."""
    rows = []
    for k in range(scores.shape[1]):
        (gradient,) = torch.autograd.grad(scores[:, k].sum(), activations, retain_graph=True)
        weights = gradient if method == "hirescam" else gradient.mean((2, 3), keepdim=True)
        rows.append((weights * activations).sum(1))
    return torch.stack(rows, 1).detach()


def assert_exact(model: Any, pictures: Tensor = PICTURES) -> None:
    activations, scores = look(model, pictures)
    for method in ("hirescam", "gradcam"):
        expected = slow_maps(activations, scores, method)
        assert expected.flatten(2).any(2).all()
        for _ in range(2):  # the second time, the pool is already known
            explanation = gradcam.explain(model, pictures, method=method, evidence="signed", target=Text(SENTENCES))
            assert explanation.layer == "visual.layer4"
            atol = 1e-6 * expected.abs().max().item()
            torch.testing.assert_close(explanation.maps.double(), expected, rtol=1e-6, atol=atol)
            torch.testing.assert_close(explanation.scores, scores.detach().float(), rtol=1e-7, atol=1e-7)
    assert "forward" not in vars(model.visual.attnpool) or model.visual.attnpool.forward.__name__ == "<lambda>"


@pytest.mark.parametrize("bias", [True, False])
def test_the_cheap_order_of_operations_gives_the_same_vectors(model: Any, bias: bool) -> None:
    pool = model.visual.attnpool
    if not bias:
        pool.v_proj.bias = None
    grid = torch.rand(2, 8 * 32, 2, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = pool(grid) if bias else pool.c_proj(pool_without_bias(pool, grid))
    torch.testing.assert_close(pool_by_attention(pool, grid), expected, rtol=1e-10, atol=1e-12)


def pool_without_bias(pool: Any, grid: Tensor) -> Tensor:
    cells = grid.flatten(2).permute(2, 0, 1)
    cells = torch.cat([cells.mean(0, keepdim=True), cells]) + pool.positional_embedding[:, None]
    rows = [part(cells).unflatten(2, (pool.num_heads, -1)) for part in (pool.q_proj, pool.k_proj, pool.v_proj)]
    query, key, value = (row.permute(1, 2, 0, 3) for row in rows)
    return F.scaled_dot_product_attention(query[:, :, :1], key, value).permute(0, 2, 1, 3).flatten(1)


@pytest.mark.parametrize("images", [1, 2])
def test_gradients_are_those_of_the_pool(model: Any, images: int) -> None:
    assert_exact(model, PICTURES[:images])


def test_what_somebody_does_to_the_gradients_is_heeded(model: Any) -> None:
    def doubled(pool: Any, at_inputs: tuple[Tensor, ...], _: Any) -> tuple[Tensor, ...]:
        return (2 * at_inputs[0], *at_inputs[1:])

    options: Any = {"evidence": "signed", "target": Text(SENTENCES)}
    plain = gradcam.explain(model, PICTURES, **options).maps
    model.visual.attnpool.register_full_backward_hook(doubled)
    torch.testing.assert_close(gradcam.explain(model, PICTURES, **options).maps, 2 * plain, rtol=1e-6, atol=1e-7)


def test_a_second_way_to_the_score_counts(model: Any) -> None:
    """Check a second path to the score: the mean after the pool does not see other uses of the pool's input."""
    pool, pool_inputs = model.visual.attnpool, []
    pool.register_forward_pre_hook(lambda _, args: pool_inputs.append(args[0]))
    pool.register_forward_hook(lambda _, args, output: output + pool_inputs[-1].mean((1, 2, 3))[:, None])
    assert_exact(model)


def test_second_derivatives_are_those_of_the_pool(model: Any) -> None:
    options: Any = {"method": "shapleycam", "evidence": "signed"}
    explanation = gradcam.explain(model, PICTURES, "visual.layer4", target=Text(SENTENCES[:2]), **options)
    plain = gradcam.explain(Unknown(model), PICTURES, "inner.visual.layer4", target=score_two, **options)
    torch.testing.assert_close(explanation.maps, plain.maps, rtol=1e-5, atol=1e-6 * plain.maps.abs().max().item())


class Unknown(torch.nn.Module):
    """A model around the towers, which runs them as a unit."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pictures: Tensor) -> Tensor:
        return self.inner.encode_image(pictures)


def score_two(vectors: Tensor) -> Tensor:
    return F.normalize(vectors, dim=1) @ F.normalize(SENTENCES[:2].to(vectors), dim=1).T


def only_cells(pool: Any, grid: Tensor) -> Tensor:
    """Pool with the same parts, but use the mean only as the query, not as a value."""
    cells = grid.flatten(2).permute(2, 0, 1)
    query, places = cells.mean(0, keepdim=True), pool.positional_embedding[1:, None]
    keys = pool.k_proj(cells + places)
    shares = (pool.q_proj(query) * keys).sum(2).softmax(0)
    return pool.c_proj((shares[:, :, None] * pool.v_proj(cells + places)).sum(0))


@pytest.mark.parametrize("is_patched", [True, False])
@pytest.mark.parametrize("replacement", [only_cells, lambda pool, grid: pool.c_proj(pool.v_proj(grid.mean((2, 3))))])
def test_a_pool_that_does_something_else_stays_as_it_is(
    model: Any, replacement: Callable[[Any, Tensor], Tensor], is_patched: bool
) -> None:
    pool = model.visual.attnpool
    if is_patched:
        pool.forward = lambda grid: replacement(pool, grid)
    else:
        pool.__class__ = type("OtherPool", (type(pool),), {"forward": replacement})
    assert_exact(model)


def test_a_pool_that_becomes_another_is_looked_at_anew(model: Any) -> None:
    assert_exact(model)
    pool = model.visual.attnpool
    pool.__class__ = type("OtherPool", (type(pool),), {"forward": only_cells})
    assert_exact(model)


def test_a_setting_of_a_pool_makes_it_another(model: Any) -> None:
    pool = model.visual.attnpool
    kind = type(pool)

    def forward(self: Any, grid: Tensor) -> Tensor:
        return (only_cells if self.is_other else kind.forward)(self, grid)

    pool.__class__ = type("Switched", (kind,), {"forward": forward})
    pool.is_other = False
    assert_exact(model)
    pool.is_other = True
    assert_exact(model)


def test_half_precision_is_rounded_as_the_model_does_it(model: Any) -> None:
    model.bfloat16()
    _, scores = look(model, PICTURES.bfloat16())
    explanation = gradcam.explain(model, PICTURES.bfloat16(), target=Text(SENTENCES.bfloat16()))
    torch.testing.assert_close(explanation.scores, scores.detach().float(), rtol=0.02, atol=0.01)
    assert explanation.maps.any()
