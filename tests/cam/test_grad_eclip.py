"""Compare Grad-ECLIP with loops over queries, patches, heads and channels, on separately computed attention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradcam
from gradcam.errors import ModelError
from tests.attention_oracles import Array, Block, OpenViT
from tests.cam.test_attention import (
    IMAGES,
    SQUARE,
    FirstViT,
    InPlace,
    TokensFirst,
    WithWeights,
    checkpoint_attentions,
    checkpoint_blocks,
    checkpoint_within_blocks,
    hugging_face_vit,
    timm_vit,
    torchvision_vit,
)
from tests.helpers import assert_same, traces

# With all classes, copies of the class token share one backward pass.
TWO_CLASSES, ALL_CLASSES = [[0, 3], [4, 1]], [[0, 1, 2, 3, 4]] * 2


class Attention(NamedTuple):
    """One attention with its graph: queries (N,heads,Q,d), keys and values (N,heads,T,d), and output (N,heads,Q,d)."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, scale: float | None = None, **__: Any) -> Tensor:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.einsum("nhqd,nhkd->nhqk", query * factor, key).softmax(-1) @ value


def look(run: Callable[[], Tensor]) -> tuple[list[Attention], Tensor]:
    """Run a function with plain code in place of fused attention; return all its attentions, and the result."""
    results: list[Attention] = []

    def open_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = attend(query, key, value, *args, **kwargs)
        results.append(Attention(query, key, value, output))
        return output

    fused, F.scaled_dot_product_attention = F.scaled_dot_product_attention, open_attention  # type: ignore[assignment]
    try:
        return results, run()
    finally:
        F.scaled_dot_product_attention = fused


def eclip(query: Array, key: Array, value: Array, slopes: Array, prefix: int) -> Array:
    """Return the map (P,) of one image and class by Zhao et al., 2024, from arrays (heads,tokens,channels)."""
    heads, queries, channels = query.shape
    heat = np.zeros(key.shape[1] - prefix)
    for q in range(queries):
        cosines, worths = [], []
        for i in range(prefix, key.shape[1]):
            product = lengths = worth = 0.0
            norms = [0.0, 0.0]
            for h, c in np.ndindex(heads, channels):
                product += query[h, q, c] * key[h, i, c]
                norms[0] += query[h, q, c] ** 2
                norms[1] += key[h, i, c] ** 2
                worth += slopes[h, q, c] * value[h, i, c]
            lengths = (norms[0] * norms[1]) ** 0.5
            cosines.append(product / lengths)
            worths.append(worth)
        low, high = min(cosines), max(cosines)
        for i, (cosine, worth) in enumerate(zip(cosines, worths)):
            heat[i] += (cosine - low) / (high - low) * worth
    return np.maximum(heat, 0)


def maps(
    attention: Attention, scores: Tensor, classes: Sequence[Sequence[int]], prefix: int, grid: tuple[int, int]
) -> Tensor:
    """Return maps (N,K,h,w) for classes (N,K) of scores (N,C)."""
    rows = []
    for image, indices in enumerate(classes):
        for index in indices:
            (slopes,) = torch.autograd.grad(scores[image, index], attention.output, retain_graph=True)
            parts = [item[image].detach().numpy() for item in (attention.query, attention.key, attention.value, slopes)]
            rows.append(torch.from_numpy(eclip(*parts, prefix).reshape(grid)))
    return torch.stack(rows).unflatten(0, (len(classes), -1))


def assert_maps(heatmaps: Tensor, expected: Tensor) -> None:
    peak = expected.max().item()
    assert (expected > 0).sum() > 2
    torch.testing.assert_close(heatmaps.double(), expected, rtol=1e-6, atol=1e-7 * peak)


def open_block(block: Block, tokens: Tensor) -> tuple[Attention, Tensor]:
    """Recompute one block of `OpenViT` from its weights."""
    query, key, value = block.qkv(block.norm(tokens)).unflatten(-1, (3, block.heads, -1)).permute(2, 0, 3, 1, 4)
    output = attend(query, key, value)
    tokens = tokens + block.out(output.transpose(1, 2).flatten(2))
    return Attention(query, key, value, output), tokens + block.mlp(tokens)


def look_into(model: OpenViT) -> tuple[Attention, Tensor]:
    tokens, attention = model.embed(IMAGES), None
    for block in model.blocks:
        attention, tokens = open_block(block, tokens)
    assert attention is not None
    return attention, model.head(tokens)


def look_at_last(model: Any, images: Tensor) -> tuple[Attention, Tensor]:
    attentions, output = look(lambda: model(images))
    return attentions[-1], output if isinstance(output, Tensor) else output.logits


def first_vit(block: type[TokensFirst]) -> FirstViT:
    return FirstViT(block=block)


def look_into_first(model: Any) -> tuple[Attention, Tensor]:
    """Recompute the last `nn.MultiheadAttention` of a tokens-first model from its weights."""
    tokens, attention = model.embed(IMAGES), None
    for block in model.blocks:
        inner = block.attention
        projected = F.linear(block.norm(tokens), inner.in_proj_weight, inner.in_proj_bias).chunk(3, -1)
        query, key, value = (item.unflatten(-1, (2, 4)).transpose(1, 2) for item in projected)
        attention = Attention(query, key, value, attend(query, key, value))
        tokens = tokens + inner.out_proj(attention.output.transpose(1, 2).flatten(2))
    assert attention is not None
    return attention, model.head(tokens)


AttentionCase = tuple[nn.Module, Tensor, Attention, Tensor, int, tuple[int, int]]


def make_open_case(model: OpenViT, prefix: int) -> AttentionCase:
    return model, IMAGES, *look_into(model), prefix, (2, 3)


def make_case(model: nn.Module, twin: nn.Module, images: Tensor, prefix: int, grid: tuple[int, int]) -> AttentionCase:
    return model, images, *look_at_last(twin, images), prefix, grid


MODELS: dict[str, Callable[[], AttentionCase]] = {
    "a class token": lambda: make_open_case(OpenViT("class", 1), 1),
    "registers behind the class token": lambda: make_open_case(OpenViT("class", 4), 4),
    "a mean over the patches": lambda: make_open_case(OpenViT("patches", 0), 0),
    "a mean over the patches beside a class token": lambda: make_open_case(OpenViT("patches", 1), 1),
    "a mean over all tokens": lambda: make_open_case(OpenViT("all", 1), 1),
    "one block": lambda: make_open_case(OpenViT("class", 1, 1), 1),
    "tokens first": lambda: (first_vit(TokensFirst), IMAGES, *look_into_first(first_vit(TokensFirst)), 1, (2, 3)),
    "with weights": lambda: (first_vit(WithWeights), IMAGES, *look_into_first(first_vit(WithWeights)), 1, (2, 3)),
    "torchvision": lambda: make_case(torchvision_vit(), torchvision_vit(), SQUARE, 1, (4, 4)),
    "transformers, eager": lambda: make_case(hugging_face_vit("eager"), hugging_face_vit("sdpa"), SQUARE, 1, (4, 4)),
    "transformers, fused": lambda: make_case(hugging_face_vit("sdpa"), hugging_face_vit("sdpa"), SQUARE, 1, (4, 4)),
    "timm, plain": lambda: make_case(timm_vit(False), timm_vit(True), IMAGES, 1, (2, 3)),
    "timm, fused": lambda: make_case(timm_vit(True), timm_vit(True), IMAGES, 1, (2, 3)),
    "timm, registers": lambda: make_timm_case(5, reg_tokens=4),
    "timm, mean": lambda: make_timm_case(1, global_pool="avg"),
    "timm, pooling by attention": lambda: make_timm_case(0, global_pool="map", class_token=False),
}


def make_timm_case(prefix: int, **options: Any) -> AttentionCase:
    return make_case(timm_vit(True, **options), timm_vit(True, **options), IMAGES, prefix, (2, 3))


@pytest.mark.parametrize("classes", [TWO_CLASSES, ALL_CLASSES])
@pytest.mark.parametrize("kind", MODELS)
def test_grad_eclip_equals_the_loops(kind: str, classes: Sequence[Sequence[int]]) -> None:
    model, images, attention, scores, prefix, grid = MODELS[kind]()
    expected = maps(attention, scores, classes, prefix, grid)
    for _ in range(2):  # in the first run, an additional pass finds the last attention
        explanation = gradcam.explain(model, images, method="grad-eclip", target=classes)
        assert_maps(explanation.maps, expected)
    assert (explanation.layer, explanation.method) == ("attention", "grad-eclip")
    assert explanation.heatmaps.shape == (2, len(classes[0]), *images.shape[2:])


def test_pooling_without_a_module_of_its_own() -> None:
    class Pooled(OpenViT):
        def head(self, tokens: Tensor) -> Tensor:
            query = self.classify.weight[None, None, :1].expand(len(tokens), -1, -1, -1)
            pooled = F.scaled_dot_product_attention(query, tokens[:, None], self.norm(tokens)[:, None])
            return self.classify(pooled[:, 0, 0])

    attentions, scores = look(lambda: Pooled()(IMAGES))
    explained = gradcam.explain(Pooled(), IMAGES, method="grad-eclip", target=ALL_CLASSES)
    assert_maps(explained.maps, maps(attentions[-1], scores, ALL_CLASSES, 1, (2, 3)))


# Worked by hand


def test_equal_keys_are_all_attended_to() -> None:
    class Alike(Block):
        def forward(self, tokens: Tensor) -> Tensor:
            query, _, value = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(query, torch.ones_like(query), value)
            return tokens + attended.transpose(1, 2).flatten(2)

    model = OpenViT(block=Alike)
    attentions, scores = look(lambda: model(IMAGES))
    (slopes,) = torch.autograd.grad(scores[:, 1].sum(), attentions[-1].output)
    worth = torch.einsum("nhc,nhic->ni", slopes[:, :, 0], attentions[-1].value[:, :, 1:])
    explained = gradcam.explain(model, IMAGES, method="grad-eclip", target=1).maps
    assert_maps(explained, worth.relu().detach().reshape(2, 1, 2, 3))


# Number of passes


def count_runs(module: nn.Module) -> list[int]:
    runs: list[int] = []
    module.register_forward_hook(lambda *_: runs.append(1))
    return runs


def test_the_first_explanation_takes_two_passes_more() -> None:
    model = OpenViT()
    fronts, lasts = count_runs(model.patches), count_runs(model.blocks[-1])
    calls: list[tuple[int, int]] = []
    options = {"method": "grad-eclip", "progress": lambda *progress: calls.append(progress)}
    for classes, passes, blocks in ((TWO_CLASSES, 3, 3), (TWO_CLASSES, 1, 1), (ALL_CLASSES, 1, 2), (ALL_CLASSES, 1, 2)):
        fronts.clear()
        lasts.clear()
        calls.clear()
        gradcam.explain(model, IMAGES, target=classes, **options)
        # With many classes, the last block runs again on copies of one token.
        assert (len(fronts), len(lasts)) == (passes, blocks)
        assert calls == [(1, 1)]


def test_many_classes_share_one_backward_pass_over_one_token() -> None:
    model = OpenViT()
    gradcam.explain(model, IMAGES, method="grad-eclip", target=TWO_CLASSES)
    rows: list[int] = []
    model.blocks[-1].mlp[1].register_forward_hook(lambda *call: rows.append(call[2].shape[1]))
    gradcam.explain(model, IMAGES, method="grad-eclip", target=ALL_CLASSES)
    # The pass itself, the check of the token order (the new hook may have changed it), and the copies.
    assert rows == [7, 7, 5]


class Rotated(Block):
    """A block that accepts exactly seven tokens, because its parameters depend on the position."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens * torch.linspace(0.9, 0.9, 7, dtype=tokens.dtype)[:, None]) + 0.1


def test_a_block_for_a_fixed_number_of_tokens() -> None:
    model = OpenViT(block=Rotated)
    twin = [gradcam.explain(model, IMAGES, method="grad-eclip", target=[[k]] * 2).maps for k in range(5)]
    rows: list[int] = []
    model.blocks[-1].mlp[1].register_forward_hook(lambda *call: rows.append(call[2].shape[1]))
    call = gradcam.explain(model, IMAGES, method="grad-eclip", target=ALL_CLASSES).maps
    assert rows == [7, 7, 7]
    torch.testing.assert_close(call, torch.cat(twin, 1), rtol=1e-6, atol=1e-9)


class Mixing(Block):
    """A block that mixes tokens after the attention: it adds the mean of all tokens to each."""

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = super().forward(tokens)
        return tokens + 0.5 * tokens.mean(1, keepdim=True).tanh()


@pytest.mark.parametrize("block", [Mixing, InPlace])
def test_blocks_that_mix_tokens_outside_the_attention(block: type[Block]) -> None:
    model = OpenViT(block=block)
    one_by_one = [gradcam.explain(model, IMAGES, method="grad-eclip", target=[[k]] * 2).maps for k in range(5)]
    together = gradcam.explain(model, IMAGES, method="grad-eclip", target=ALL_CLASSES).maps
    torch.testing.assert_close(together, torch.cat(one_by_one, 1), rtol=1e-6, atol=1e-9)


def test_mixing_behind_the_attention_is_followed() -> None:
    model = OpenViT(block=Mixing)
    tokens, attention = model.embed(IMAGES), None
    for block in model.blocks:
        attention, tokens = open_block(block, tokens)
        tokens = tokens + 0.5 * tokens.mean(1, keepdim=True).tanh()
    assert attention is not None
    expected = maps(attention, model.head(tokens), ALL_CLASSES, 1, (2, 3))
    assert_maps(gradcam.explain(model, IMAGES, method="grad-eclip", target=ALL_CLASSES).maps, expected)


# Cached facts about a model


def test_a_block_that_is_put_behind_the_last_one() -> None:
    model = OpenViT()
    gradcam.explain(model, IMAGES, method="grad-eclip", target=TWO_CLASSES)
    model.blocks.append(copy.deepcopy(model.blocks[0]))
    expected = maps(*look_into(model), ALL_CLASSES, 1, (2, 3))
    for _ in range(2):
        assert_maps(gradcam.explain(model, IMAGES, method="grad-eclip", target=ALL_CLASSES).maps, expected)


def test_beside_layers_and_other_methods_in_one_comparison() -> None:
    model = OpenViT()
    expected = maps(*look_into(model), ALL_CLASSES, 1, (2, 3))
    methods = ["gradcam", "eigencam", "legrad", "grad-eclip"]
    for _ in range(2):
        explanations = gradcam.compare(model, IMAGES, layers=["blocks.1"], methods=methods, target=ALL_CLASSES)
        assert_maps(explanations["attention", "grad-eclip"].maps, expected)
        alone = gradcam.explain(model, IMAGES, "blocks.1", target=ALL_CLASSES)
        torch.testing.assert_close(explanations["blocks.1", "gradcam"].maps, alone.maps, rtol=1e-5, atol=1e-9)
    of_activations = gradcam.compare(
        model, IMAGES, layers=["blocks.2"], methods=["eigencam", "grad-eclip"], target=ALL_CLASSES
    )
    assert_maps(of_activations["attention", "grad-eclip"].maps, expected)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("form", [checkpoint_blocks, checkpoint_within_blocks, checkpoint_attentions])
def test_checkpoints(form: Callable[[Any], None], frozen: bool) -> None:
    model = timm_vit(True).requires_grad_(not frozen)
    expected = gradcam.explain(model, IMAGES, method="grad-eclip", target=ALL_CLASSES).maps
    form(model)
    before = traces(model)
    for classes in (ALL_CLASSES, [[0], [0]], ALL_CLASSES):
        maps_of_classes = gradcam.explain(model, IMAGES, method="grad-eclip", target=classes).maps
        torch.testing.assert_close(maps_of_classes, expected[:, : len(classes[0])], rtol=1e-6, atol=1e-9)
    assert_same(before, traces(model))
    assert expected.any()


def test_many_classes_in_half_precision() -> None:
    model = torchvision_vit().float()
    full = gradcam.explain(model, SQUARE.float(), method="grad-eclip", target=ALL_CLASSES).maps
    for dtype in (torch.bfloat16, torch.float16):
        twin = copy.deepcopy(model).to(dtype)
        half = gradcam.explain(twin, SQUARE.to(dtype), method="grad-eclip", target=ALL_CLASSES).maps
        assert torch.corrcoef(torch.stack([full.flatten(), half.flatten()]))[0, 1] > 0.99


class BySums(Block):
    """Attention whose products are sums, not matrix products, so that its queries and keys are not found."""

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(tokens)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (query[:, :, :, None] * key[:, :, None]).sum(-1).softmax(-1)
        return tokens + (weights[..., None] * value[:, :, None]).sum(-2).transpose(1, 2).flatten(2)


def test_attention_whose_queries_are_not_found_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"the queries and keys of the attention in 'blocks\.2' were not found"):
        gradcam.explain(OpenViT(block=BySums), IMAGES, method="grad-eclip", target=1)


def test_windows_are_no_attention_over_the_image() -> None:
    class Windows(Block):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens.reshape(-1, 3, 8)).reshape(tokens.shape)

    with pytest.raises(ModelError, match="it covers only windows"):
        gradcam.explain(OpenViT("patches", 0, block=Windows), IMAGES, method="grad-eclip", target=1)
