"""Check attention methods against loops over separately computed matrices, and check how attention is captured."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradcam
from gradcam.cam.methods.attention import accumulate, roll_out, weigh
from gradcam.cam.methods.attention_capture import AttentionPatch
from gradcam.errors import BlindLayerError, GradcamError, ModelError
from gradcam.hooks.pytorch import VERSION
from tests import attention_oracles as slow
from tests.attention_oracles import Block, OpenViT
from tests.cli.test_cli import Command, folder, gradcam_command, run
from tests.helpers import TINY, assert_same, tiny_model, tiny_vit, traces

__all__ = ["folder", "gradcam_command", "run"]  # fixtures

METHODS = ["rollout", "gradient-rollout", "legrad"]
ALL = [*METHODS, "grad-eclip"]
CLASSES = [[0, 3], [4, 1]]
IMAGES = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
SQUARE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def assert_maps(maps: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 0
    assert expected.flatten(2).std(2).min() > 0
    peak = expected.abs().max().item()
    torch.testing.assert_close(maps.double(), expected, rtol=1e-5, atol=1e-6 * peak)


def randomise_attention(model: nn.Module) -> nn.Module:
    """Give the model weights so large that its attention is far from uniform."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def torchvision_vit() -> nn.Module:
    torch.manual_seed(0)
    options = {"num_layers": 3, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32, "num_classes": 5}
    return randomise_attention(torchvision.models.VisionTransformer(image_size=32, patch_size=8, **options))


def hugging_face_vit(attention: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = tiny_vit(num_hidden_layers=3, num_labels=5, attn_implementation=attention)
    return randomise_attention(transformers.ViTForImageClassification(config))


def timm_vit(fused: bool, **options: Any) -> Any:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    shape = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 5}
    model = randomise_attention(timm.models.VisionTransformer(**shape, **options))
    for block in model.blocks:
        block.attn.fused_attn = fused
    return model


AttentionCase = tuple[nn.Module, Tensor, slow.Anatomy, list[int], tuple[int, int]]


def open_vit(reads: str, prefix: int, read: list[int], blocks: int = 3) -> AttentionCase:
    model = OpenViT(reads, prefix, blocks)
    return model, IMAGES, model.open(IMAGES), read, (2, 3)


def open_timm(read: list[int], **options: Any) -> AttentionCase:
    return timm_vit(True, **options), IMAGES, slow.open_timm(timm_vit(False, **options), IMAGES), read, (2, 3)


def open_hugging_face(attention: str) -> AttentionCase:
    anatomy = slow.open_hugging_face(hugging_face_vit("eager"), SQUARE)
    return hugging_face_vit(attention), SQUARE, anatomy, [0], (4, 4)


MODELS: dict[str, Callable[[], AttentionCase]] = {
    "a class token": lambda: open_vit("class", 1, [0]),
    "registers behind the class token": lambda: open_vit("class", 4, [0]),
    "a mean over the patches": lambda: open_vit("patches", 0, [0, 1, 2, 3, 4, 5]),
    "a mean over the patches beside a class token": lambda: open_vit("patches", 1, [1, 2, 3, 4, 5, 6]),
    "a mean over all tokens": lambda: open_vit("all", 1, [0, 1, 2, 3, 4, 5, 6]),
    "one block": lambda: open_vit("class", 1, [0], blocks=1),
    "torchvision": lambda: (torchvision_vit(), SQUARE, slow.open_torchvision(torchvision_vit(), SQUARE), [0], (4, 4)),
    "transformers, eager": lambda: open_hugging_face("eager"),
    "transformers, fused": lambda: open_hugging_face("sdpa"),
    "timm, plain": lambda: (timm_vit(False), IMAGES, slow.open_timm(timm_vit(False), IMAGES), [0], (2, 3)),
    "timm, fused": lambda: open_timm([0]),
    "timm, registers": lambda: open_timm([0], reg_tokens=4),
    "timm, mean": lambda: open_timm([1, 2, 3, 4, 5, 6], global_pool="avg"),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_method_equals_the_loop_over_matrices(kind: str, name: str) -> None:
    model, images, anatomy, read, grid = MODELS[kind]()
    explanation = gradcam.explain(model, images, method=name, target=CLASSES)
    assert_maps(explanation.maps, slow.maps(name, anatomy, CLASSES, read, grid))
    assert (explanation.layer, explanation.method) == ("attention", name)
    assert explanation.heatmaps.shape == (2, 2, *images.shape[2:])
    assert explanation.classes is not None
    assert explanation.classes.tolist() == CLASSES


def checkpoint_blocks(model: Any) -> None:
    model.set_grad_checkpointing(True)


def checkpoint_within_blocks(model: Any) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def checkpoint_attentions(model: Any) -> None:
    for block in model.blocks:
        block.attn.forward = partial(checkpoint, block.attn.forward, use_reentrant=False)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("form", [checkpoint_blocks, checkpoint_within_blocks, checkpoint_attentions])
@pytest.mark.parametrize("name", METHODS)
def test_blocks_that_a_backward_pass_repeats(name: str, form: Callable[[Any], None], frozen: bool) -> None:
    model = timm_vit(True).requires_grad_(not frozen)
    expected = gradcam.explain(model, IMAGES, method=name, target=CLASSES).maps
    form(model)
    before = traces(model)
    assert_maps(gradcam.explain(model, IMAGES, method=name, target=CLASSES).maps, expected.double())
    assert_same(before, traces(model))


def test_legrad_runs_block_by_block_through_checkpoints() -> None:
    model = timm_vit(True, global_pool="avg")
    model.fc_norm = MixesRows()
    expected = gradcam.explain(model, IMAGES, method="legrad", target=CLASSES).maps
    model.set_grad_checkpointing(True)
    assert_maps(gradcam.explain(model, IMAGES, method="legrad", target=CLASSES).maps, expected.double())


class MixesRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(0, keepdim=True)


def test_a_head_that_reads_two_tokens() -> None:
    timm = pytest.importorskip("timm")
    shape = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    model = randomise_attention(timm.models.deit.VisionTransformerDistilled(**shape))
    plain = copy.deepcopy(model)
    for block in plain.blocks:
        block.attn.fused_attn = False
    for name in METHODS:
        explanation = gradcam.explain(model, IMAGES, method=name, target=CLASSES)
        assert_maps(explanation.maps, slow.maps(name, slow.open_timm(plain, IMAGES), CLASSES, [0, 1], (2, 3)))


# By hand


def test_rollout_by_hand() -> None:
    first = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])  # averaged with the identity: rows (3/4, 1/4) and (0, 1)
    last = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])  # averaged with the identity: rows (1/2, 1/2) and (1/2, 1/2)
    assert roll_out([first, last], torch.tensor([1.0, 0.0])).tolist() == [[0.375, 0.625]]
    assert roll_out([last, first], torch.tensor([1.0, 0.0])).tolist() == [[0.5, 0.5]]
    # The first row sums to 1/2; averaged with the identity it is (3/4, 0), which is then divided by its sum.
    masked = torch.tensor([[[0.5, 0.0], [0.0, 1.0]]])
    assert roll_out([masked], torch.tensor([0.5, 0.5])).tolist() == [[0.5, 0.5]]


def test_gradient_rollout_by_hand() -> None:
    first, last = torch.tensor([[0.0, 2.0], [1.0, 0.0]]), torch.tensor([[0.0, 3.0], [0.0, 0.0]])
    # (I + last) (I + first) - I = (1 3; 0 1) (1 2; 1 1) - I = (4 5; 1 1) - I.
    assert accumulate([first, last], torch.tensor([1.0, 0.0])).tolist() == [3.0, 5.0]
    assert accumulate([first, last], torch.tensor([0.0, 1.0])).tolist() == [1.0, 0.0]


def test_heads_are_averaged_after_negative_values_are_removed() -> None:
    attention = torch.tensor([[[[0.5]], [[1.0]]]])  # one image, two heads, one token
    gradients = torch.tensor([[[[[4.0]], [[-8.0]]]], [[[[-1.0]], [[3.0]]]]])  # two classes
    assert weigh(attention, gradients).flatten().tolist() == [1.0, 1.5]


def test_values_much_smaller_than_one_are_not_lost() -> None:
    small = torch.tensor([[0.0, 1e-20], [0.0, 1e-20]])
    assert accumulate([small, small], torch.tensor([0.5, 0.5])).tolist() == pytest.approx([0.0, 2e-20], rel=1e-6)


# Targets, outputs, other options


@pytest.mark.parametrize("name", METHODS)
def test_targets_in_all_forms(name: str) -> None:
    model = OpenViT()

    def maps(target: Any) -> Tensor:
        return gradcam.explain(model, IMAGES, method=name, target=target).maps

    expected = slow.maps(name, model.open(IMAGES), [[3], [1]], [0], (2, 3))
    assert_maps(maps([3, 1]), expected)
    picked = gradcam.explain(model, IMAGES, method=name, target=lambda output: output[[0, 1], [3, 1]])
    assert_maps(picked.maps, expected)
    assert picked.classes is None
    top = model(IMAGES).argmax(1).tolist()
    torch.testing.assert_close(maps(None), maps(top))
    contrast = maps(gradcam.targets.ClassTarget([3, 1], score="contrast"))
    assert torch.equal(contrast, maps([3, 1])) == (name == "rollout")


def test_rollout_does_not_depend_on_the_target() -> None:
    class Sure(OpenViT):
        def head(self, tokens: Tensor) -> Tensor:
            return super().head(tokens) * 1e4  # the probabilities become exactly 0 and 1, where softmax has no gradient

    target = gradcam.targets.ClassTarget(score="probability")
    maps = gradcam.explain(Sure(), IMAGES[:1], method="rollout", target=target).maps
    torch.testing.assert_close(maps, gradcam.explain(OpenViT(), IMAGES[:1], method="rollout", target=2).maps)
    for name in ("gradient-rollout", "legrad"):
        with pytest.raises(BlindLayerError, match=r"'blocks\.2', is exactly zero"):
            gradcam.explain(Sure(), IMAGES[:1], method=name, target=target)


@pytest.mark.parametrize("name", METHODS)
def test_one_logit_explained_for_and_against(name: str) -> None:
    class Single(OpenViT):
        def head(self, tokens: Tensor) -> Tensor:
            return super().head(tokens)[:, :1]

    model = Single()
    for index, sign in ((1, 1.0), (0, -1.0)):
        target = gradcam.targets.ClassTarget(index, activation="sigmoid")
        explanation = gradcam.explain(model, IMAGES, method=name, target=target)
        anatomy = model.open(IMAGES)
        signed = slow.Anatomy(anatomy.attentions, anatomy.outputs, lambda tokens, sign=sign: sign * model.head(tokens))
        assert_maps(explanation.maps, slow.maps(name, signed, [[0], [0]], [0], (2, 3)))


@pytest.mark.parametrize("name", ALL)
def test_an_image_does_not_depend_on_its_neighbours(name: str) -> None:
    together = gradcam.explain(OpenViT(), IMAGES, method=name, target=[0, 4]).maps
    for index, target in enumerate([0, 4]):
        alone = gradcam.explain(OpenViT(), IMAGES[index : index + 1], method=name, target=target).maps
        torch.testing.assert_close(together[index : index + 1], alone, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_views_are_averaged(name: str) -> None:
    model = OpenViT()
    maps = gradcam.explain(model, IMAGES, method=name, target=CLASSES, augmentation="flip").maps
    plain = gradcam.explain(model, IMAGES, method=name, target=CLASSES).maps
    mirrored = gradcam.explain(model, IMAGES.flip(-1), method=name, target=CLASSES).maps.flip(-1)
    torch.testing.assert_close(maps, (plain + mirrored) / 2, rtol=1e-5, atol=1e-9)
    assert not torch.allclose(plain, mirrored, rtol=1e-3)


def test_all_attention_methods_beside_layers_in_one_comparison() -> None:
    model = OpenViT()
    methods = ["gradcam", *METHODS, "eigencam"]
    explanations = gradcam.compare(model, IMAGES, layers=["blocks.1"], methods=methods, target=1)
    places = [("blocks.1", "gradcam"), *(("attention", name) for name in METHODS), ("blocks.1", "eigencam")]
    assert set(explanations) == set(places)
    for (layer, name), item in explanations.items():
        alone = gradcam.explain(model, IMAGES, None if layer == "attention" else layer, method=name, target=1)
        torch.testing.assert_close(item.maps, alone.maps, rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(item.output, model(IMAGES).detach())
    assert list(gradcam.compare(model, IMAGES, layers=[], methods=["legrad"], target=1)) == [("attention", "legrad")]


@pytest.mark.parametrize("name", ALL)
def test_there_is_positive_evidence_alone_and_no_channels(name: str) -> None:
    with pytest.raises(GradcamError, match=f"{name} shows positive evidence only"):
        gradcam.explain(OpenViT(), IMAGES, method=name, evidence="signed")
    with pytest.raises(GradcamError, match=f"{name} does not sum channels"):
        gradcam.explain(OpenViT(), IMAGES, method=name, smoothing="eigen")


@pytest.mark.parametrize(("name", "classes"), [("rollout", 1), ("gradient-rollout", 4), ("legrad", 4)])
def test_the_model_runs_twice_for_any_target(name: str, classes: int) -> None:
    model, runs = OpenViT(), []
    model.patches.register_forward_hook(lambda *_: runs.append(1))
    calls: list[tuple[int, int]] = []
    target = [list(range(classes))] * 2
    for passes in (3, 2):  # the first explanation needs another pass to locate the grid among the tokens
        runs.clear()
        calls.clear()
        gradcam.explain(model, IMAGES, method=name, target=target, progress=lambda *progress: calls.append(progress))
        assert len(runs) == passes
        assert calls == [(1, 1)]


# Unusual blocks


class InPlace(Block):
    """A block that changes its input and its attention in place."""

    def forward(self, tokens: Tensor) -> Tensor:
        tokens.mul_(0.5).add_(1.0)
        query, key, value = self.qkv(self.norm(tokens)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = (query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).softmax(-1)
        mixed = attention.mul_(2.0).div_(2.0) @ value
        tokens = self.out(mixed.transpose(1, 2).flatten(2)).add_(tokens)
        return self.mlp(tokens).add_(tokens)


class TokensFirst(nn.Module):
    """A block for tokens of shape (T,N,D) that uses `nn.MultiheadAttention`, with or without returning its weights."""

    need_weights = False

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(width, heads), nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        normed = self.norm(tokens)
        return tokens + self.attention(normed, normed, normed, need_weights=self.need_weights)[0]


class WithWeights(TokensFirst):
    need_weights = True


class FirstViT(OpenViT):
    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).transpose(0, 1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens.transpose(0, 1))

    def open(self, images: Tensor) -> slow.Anatomy:
        tokens, attentions, outputs = self.embed(images), [], []
        for block in self.blocks:
            normed, inner = block.norm(tokens), block.attention
            query, key, value = F.linear(normed, inner.in_proj_weight, inner.in_proj_bias).chunk(3, -1)
            heads = [item.unflatten(-1, (2, 4)).transpose(1, 2) for item in (query, key, value)]
            attentions.append((heads[0] @ heads[1].transpose(-2, -1) / 2).softmax(-1))
            tokens = tokens + inner.out_proj((attentions[-1] @ heads[2]).transpose(1, 2).flatten(2))
            outputs.append(tokens)
        return slow.Anatomy(attentions, outputs, self.head)


@pytest.mark.parametrize("name", METHODS)
def test_blocks_that_change_in_place_what_they_get(name: str) -> None:
    class OutOfPlace(Block):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens * 0.5 + 1.0)

    explanation = gradcam.explain(OpenViT(block=InPlace), IMAGES, method=name, target=CLASSES)
    assert_maps(explanation.maps, slow.maps(name, OpenViT(block=OutOfPlace).open(IMAGES), CLASSES, [0], (2, 3)))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("block", [TokensFirst, WithWeights])
def test_tokens_before_images(block: type[TokensFirst], name: str) -> None:
    model, runs = FirstViT(block=block), []
    model.patches.register_forward_hook(lambda *_: runs.append(1))
    explanation = gradcam.explain(model, IMAGES, method=name, target=CLASSES)
    assert len(runs) == 3
    assert_maps(explanation.maps, slow.maps(name, model.open(IMAGES), CLASSES, [0], (2, 3)))


def test_pytorchs_encoder_takes_its_slow_path() -> None:
    class Encoder(OpenViT):
        def __init__(self) -> None:
            super().__init__(blocks=0)
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.double().eval()

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.blocks(self.embed(images)))

    model = Encoder()
    weights = []
    with torch.no_grad():
        tokens = model.embed(IMAGES)
        for block in model.blocks.layers:
            weights.append(block.self_attn(tokens, tokens, tokens, average_attn_weights=False)[1])
            tokens = block(tokens)
    expected = slow.maps("rollout", slow.Anatomy(weights, [], model.head), CLASSES, [0], (2, 3))
    assert_maps(gradcam.explain(model, IMAGES, method="rollout", target=CLASSES).maps, expected)


def test_attention_behind_the_blocks_belongs_to_the_head() -> None:
    class Pooled(OpenViT):
        def head(self, tokens: Tensor) -> Tensor:
            weights = (tokens @ self.classify.weight[0][:, None]).transpose(1, 2)[:, None].softmax(-1)  # a single query
            return self.classify(weights[:, 0] @ self.norm(tokens))[:, 0]

    model = Pooled("all")
    for name in METHODS:
        explanation = gradcam.explain(model, IMAGES, method=name, target=CLASSES)
        assert_maps(explanation.maps, slow.maps(name, model.open(IMAGES), CLASSES, list(range(7)), (2, 3)))


class Folding(OpenViT):
    """A model whose head accepts only as many rows as there are images, or mixes rows."""

    mixes = False

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images)
        for block in self.blocks:
            tokens = block(tokens)
        if self.mixes:
            return self.head(tokens) + 0.1 * self.head(tokens).mean(0).detach()
        return self.head(tokens.reshape(len(images), 7, 8))


@pytest.mark.parametrize("mixes", [False, True])
def test_legrad_runs_block_by_block_where_rows_are_not_alike(mixes: bool) -> None:
    model, runs = Folding(), []
    model.mixes = mixes
    model.patches.register_forward_hook(lambda *_: runs.append(1))
    explanation = gradcam.explain(model, IMAGES, method="legrad", target=CLASSES)
    assert_maps(explanation.maps, slow.maps("legrad", OpenViT().open(IMAGES), CLASSES, [0], (2, 3)))
    assert len(runs) == 3 + 3


# Replacing the fused attention kernel changes no output


def attend(**options: Any) -> tuple[Tensor, Tensor]:
    """Return the output of PyTorch's attention while it is patched, and without the patch."""
    query, key, value = (torch.randn(2, 4, 5, 6, dtype=options.pop("dtype", torch.float64)) for _ in range(3))
    if options.get("enable_gqa"):
        key, value = key[:, ::2], value[:, ::2]
    captured: list[Tensor] = []

    def keep(probabilities: Tensor) -> Tensor:
        captured.append(probabilities)
        return probabilities

    plain = F.scaled_dot_product_attention(query, key, value, **options)
    with AttentionPatch(lambda shape: keep if shape == (2, 4, 5, 5) else None):
        patched = F.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(captured[0].sum(-1), torch.ones_like(captured[0].sum(-1)))
    return patched, plain


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"is_causal": True},
        pytest.param(
            {"enable_gqa": True}, marks=pytest.mark.skipif(VERSION < (2, 5), reason="PyTorch has no grouped queries")
        ),
        {"attn_mask": torch.arange(25).reshape(5, 5) % 3 != 1},
        {"attn_mask": torch.linspace(-2, 2, 25, dtype=torch.float64).reshape(5, 5)},
    ],
)
def test_open_attention_equals_the_fused_kind(options: dict[str, Any]) -> None:
    torch.testing.assert_close(*attend(**options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_open_attention_in_other_precisions(dtype: torch.dtype) -> None:
    query = torch.randn(2, 4, 5, 6, dtype=dtype)
    kinds = []

    def keep(probabilities: Tensor) -> Tensor:
        kinds.append(probabilities.dtype)
        return probabilities

    with AttentionPatch(lambda _: keep):
        output = F.scaled_dot_product_attention(query, query, query)
    assert (output.dtype, kinds) == (dtype, [torch.float32])
    exact = F.scaled_dot_product_attention(*[query.double()] * 3)
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_open_attention_under_autocast() -> None:
    query = torch.randn(2, 4, 5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = F.scaled_dot_product_attention(query, query, query)
        with AttentionPatch(lambda _: lambda probabilities: probabilities):
            output = F.scaled_dot_product_attention(query, query, query)
    assert output.dtype == plain.dtype
    torch.testing.assert_close(output.float(), plain.float(), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    "softmax", [F.softmax, torch.softmax, Tensor.softmax, lambda logits, dim: nn.Softmax(dim)(logits)]
)
def test_every_softmax_over_the_last_of_three_axes_is_met(softmax: Callable[..., Tensor]) -> None:
    shapes = []
    with AttentionPatch(lambda shape: shapes.append(shape)):
        softmax(torch.ones(2, 3, 4, 4), dim=-1)
        softmax(torch.ones(2, 4, 4), dim=2)
        softmax(torch.ones(2, 4, 4), dim=1)
        softmax(torch.ones(2, 5), dim=-1)
    assert shapes == [(2, 3, 4, 4), (2, 4, 4)]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_correlates_with_full(dtype: torch.dtype, name: str) -> None:
    model = torchvision_vit().float()
    full = gradcam.explain(model, SQUARE.float(), method=name, target=CLASSES).maps
    half = gradcam.explain(copy.deepcopy(model).to(dtype), SQUARE.to(dtype), method=name, target=CLASSES).maps
    with torch.autocast("cpu", dtype=dtype):
        cast = gradcam.explain(model, SQUARE.float(), method=name, target=CLASSES).maps
    for heatmaps in (half, cast):
        assert heatmaps.dtype == torch.float32
        assert torch.corrcoef(torch.stack([full.flatten(), heatmaps.flatten()]))[0, 1] > 0.99


@pytest.mark.parametrize("name", ["gradient-rollout", "legrad"])
def test_small_gradients_are_not_lost_in_float16(name: str) -> None:
    model = torchvision_vit().float()
    with torch.no_grad():
        model.heads[0].weight.mul_(2.0**-20)
    full = gradcam.explain(model, SQUARE.float(), method=name, target=1).heatmaps
    # The score is float32; only the layers before it are in half precision.
    model.heads.register_forward_hook(lambda *call: call[2].float())
    with torch.autocast("cpu", dtype=torch.float16):
        cast = gradcam.explain(model, SQUARE.float(), method=name, target=1).heatmaps
    half = gradcam.explain(model.half(), SQUARE.half(), method=name, target=1).heatmaps
    for heatmaps in (cast, half):
        assert torch.corrcoef(torch.stack([full.flatten(), heatmaps.flatten()]))[0, 1] > 0.97


# Models whose attention cannot be followed


class Windows(Block):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.reshape(-1, 3, 8)).reshape(tokens.shape)


class Twice(Block):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(super().forward(tokens))


class OverChannels(Block):
    def forward(self, tokens: Tensor) -> Tensor:
        weights = (tokens.transpose(1, 2) @ tokens)[:, None].softmax(-1)
        return tokens @ weights[:, 0]


class OverHeadsChannels(Block):
    def forward(self, tokens: Tensor) -> Tensor:
        heads = tokens.unflatten(-1, (2, 4)).permute(0, 2, 3, 1)
        return ((heads @ heads.transpose(-2, -1)).softmax(-1) @ heads).permute(0, 3, 1, 2).flatten(2)


class PooledKeys(Block):
    def forward(self, tokens: Tensor) -> Tensor:
        keys = tokens[:, ::2]
        return tokens + (tokens @ keys.transpose(1, 2))[:, None].softmax(-1)[:, 0] @ keys


def first_in_windows() -> OpenViT:
    """Return a model whose first block attends within windows; the later blocks attend over the whole image."""
    model = OpenViT("patches", 0)
    model.blocks[0] = Windows(8, 2).double()
    return model


class Coarser(OpenViT):
    def forward(self, images: Tensor) -> Tensor:
        tokens = self.blocks[0](self.embed(images))
        return self.head(self.blocks[2](self.blocks[1](tokens[:, :6])))


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (tiny_model, "Sequential cannot be traced back to the image: no attention was found. The model has no attention"),
    (lambda: OpenViT("patches", 0, block=Windows), r"'blocks\.0' is \(4, 2, 3, 3\) for 2 image\(s\): it covers only"),
    (first_in_windows, r"in 'blocks\.0' is \(4, 2, 3, 3\) for 2 image\(s\): it covers only windows"),
    (
        lambda: OpenViT(block=Twice),
        "'blocks.0' has no block .a module that contains only this attention, and returns its 7 tokens",
    ),
    (lambda: OpenViT(block=OverChannels), "'blocks.0' has no block .* returns its 8 tokens"),
    (lambda: OpenViT(block=OverHeadsChannels), r"is \(2, 2, 4, 4\), and 4 tokens form no grid on images of 16 x 24"),
    (lambda: OpenViT(block=PooledKeys), r"\(2, 1, 7, 4\): its queries and keys are different tokens"),
    (Coarser, "the number of tokens changes between blocks, from 7 to 6"),
]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_attention_that_cannot_be_followed(make: Callable[[], nn.Module], message: str, name: str) -> None:
    model = make()
    images = TINY if isinstance(model, nn.Sequential) else IMAGES
    with pytest.raises(ModelError, match=message) as caught:
        gradcam.explain(model, images, method=name, target=1)
    assert "Choose a method that explains a layer, such as 'gradcam'" in str(caught.value)


class SideBySide(nn.Module):
    """Two parallel attention blocks on the same tokens, as in timm's parallel blocks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Block(width, heads) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.branches[0](tokens) + self.branches[1](tokens)


class Bypassed(OpenViT):
    """A model whose head also reads the output of the second-to-last block."""

    def forward(self, images: Tensor) -> Tensor:
        before = self.blocks[1](self.blocks[0](self.embed(images)))
        return self.head(self.blocks[2](before)) + self.head(before)


@pytest.mark.parametrize("images", [IMAGES, IMAGES[:1]])  # a single image also broadcasts to any number of rows
@pytest.mark.parametrize("make", [lambda: OpenViT(block=SideBySide), Bypassed])
def test_legrad_refuses_a_score_that_reads_earlier_blocks(make: Callable[[], nn.Module], images: Tensor) -> None:
    with pytest.raises(ModelError, match="The score also depends on earlier blocks"):
        gradcam.explain(make(), images, method="legrad", target=1)
    assert gradcam.explain(make(), images, method="gradient-rollout", target=1).maps.any()


@pytest.mark.parametrize("name", ALL)
def test_a_constant_score(name: str) -> None:
    model = OpenViT()
    nn.init.zeros_(model.classify.weight)
    with pytest.raises(BlindLayerError, match=r"last attention block, 'blocks\.2', is exactly zero"):
        gradcam.explain(model, IMAGES, method=name, target=1)


class Unrecorded(OpenViT):
    def head(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return super().head(tokens)


class NeverRecorded(OpenViT):
    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).detach()


@pytest.mark.parametrize("name", ALL)
def test_a_model_that_switches_recording_off(name: str) -> None:
    with pytest.raises(GradcamError, match=r"The score does not depend on layer 'blocks\.2'"):
        gradcam.explain(Unrecorded(), IMAGES, method=name, target=1)
    with pytest.raises(ModelError, match=r"Gradient recording is off after layer 'blocks\.2'"):
        gradcam.explain(NeverRecorded(), IMAGES, method=name, target=1)


# Nothing is left on the model


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("make", [OpenViT, torchvision_vit])
def test_nothing_is_left_behind(make: Callable[[], nn.Module], name: str) -> None:
    model = make().train()
    images = (IMAGES if isinstance(model, OpenViT) else SQUARE).clone().requires_grad_()
    before, original = traces(model), images.detach().clone()
    gradcam.explain(model, images, method=name, target=CLASSES)
    assert_same(before, traces(model))
    assert torch.equal(images, original)
    assert images.grad is None
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("run", [1, 2])
def test_nothing_is_left_behind_by_an_exception(run: int, name: str) -> None:
    model, runs = OpenViT().train(), []

    class Broken(Exception):
        pass

    def fail(*_: object) -> None:
        runs.append(1)
        if len(runs) >= run:
            raise Broken

    model.blocks[2].mlp.register_forward_hook(fail)
    before = traces(model)
    with pytest.raises(Broken):
        gradcam.explain(model, IMAGES, method=name, target=1)
    assert len(runs) >= run
    assert_same(before, traces(model))
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("name", METHODS)
def test_an_exception_that_the_model_catches_itself(name: str) -> None:
    class Trying(Block):
        def forward(self, tokens: Tensor) -> Tensor:
            try:
                self.mlp(tokens[..., :5])
            except RuntimeError:
                return super().forward(tokens)
            raise AssertionError

    expected = slow.maps(name, OpenViT().open(IMAGES), CLASSES, [0], (2, 3))
    explanation = gradcam.explain(OpenViT(block=Trying), IMAGES, method=name, target=CLASSES)
    assert_maps(explanation.maps, expected)


@pytest.mark.parametrize("name", ALL)
def test_several_threads_explain_with_one_model(name: str) -> None:
    model = torchvision_vit()
    expected = [gradcam.explain(model, SQUARE, method=name, target=target).maps for target in range(4)]
    before, failures = traces(model), []

    def work(target: int) -> None:
        for _ in range(5):
            maps = gradcam.explain(model, SQUARE, method=name, target=target).maps
            if not torch.allclose(maps, expected[target], rtol=1e-5, atol=1e-9):
                failures.append(target)

    threads = [threading.Thread(target=work, args=(target,)) for target in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert_same(before, traces(model))


def test_recording_is_off_again_for_the_methods_that_follow() -> None:
    model, modes = OpenViT(), []
    model.patches.register_forward_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    methods = [*METHODS, gradcam.METHODS["rise"].using(masks=2)]
    gradcam.compare(model, IMAGES, layers=[], methods=methods, target=1)
    assert len(modes) > 4
    assert not any(modes)


def test_a_frozen_model_in_inference_mode() -> None:
    model = OpenViT().requires_grad_(False)
    expected = {name: gradcam.explain(OpenViT(), IMAGES, method=name, target=1).maps for name in METHODS}
    with torch.inference_mode():
        for name in METHODS:
            torch.testing.assert_close(gradcam.explain(model, IMAGES, method=name, target=1).maps, expected[name])


# On the command line


@pytest.mark.parametrize("name", ALL)
def test_the_command_line_reports_a_network_without_attention(
    run: Command, folder: Path, photo: Callable[[str], Path], name: str
) -> None:
    outcome = run(photo("chelsea.jpg"), "--method", name)
    assert outcome.status == 1
    assert "chelsea.jpg: The attention of" in outcome.err
    assert "cannot be traced back to the image: no attention was found" in outcome.err
    assert list(folder.iterdir()) == []


def test_attention_methods_take_no_layer_on_the_command_line(
    run: Command, folder: Path, photo: Callable[[str], Path], classifier: gradcam.Classifier, monkeypatch: Any
) -> None:
    options = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 16}
    model = randomise_attention(torchvision.models.VisionTransformer(224, 32, **options)).float()
    vit = dataclasses.replace(classifier, model=model, layer="encoder.layers.encoder_layer_1.ln_1")
    monkeypatch.setattr("gradcam.models.load.load_model", lambda *_, layer, **__: dataclasses.replace(vit, layer=layer))
    layers = [option for block in (0, 1) for option in ("-l", f"encoder.layers.encoder_layer_{block}.ln_1")]
    outcome = run(photo("chelsea.jpg"), *layers, "--method", "rollout", "--method", "gradcam", "-c", "281")
    assert (outcome.status, outcome.err) == (0, "")
    names = sorted(path.name for path in folder.iterdir())
    assert names[-1] == "chelsea-rollout-281-tabby.png"
    assert len(names) == 3
    assert "rollout at attention (7 x 7)" in outcome.out


def test_no_panel_is_made_of_attention(gradcam_command: Command, photo: Callable[[str], Path]) -> None:
    outcome = gradcam_command("compare", photo("chelsea.jpg"), "--method", "legrad")
    assert outcome.status == 2
    assert "legrad makes no heatmap at a layer" in outcome.err
