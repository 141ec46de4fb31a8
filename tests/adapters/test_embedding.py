"""Test image embeddings of every family: maps against plain hooks and autograd through the full graph."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import gradcam
from gradcam.adapters.embedding import find_embedder
from gradcam.errors import ImageError, TargetError
from gradcam.targets.likeness import Like
from gradcam.targets.text import Text
from tests import attention_oracles as slow
from tests.cam.test_grad_eclip import Attention, attend
from tests.cam.test_grad_eclip import look as look_at_attention
from tests.cam.test_grad_eclip import maps as eclip_maps
from tests.helpers import assert_same, traces

SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT = {**SIZE, **TOKENS, "vocab_size": 64, "max_position_embeddings": 12}
VISION = {**SIZE, "image_size": 32, "patch_size": 8}
PICTURES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def awake(model: nn.Module) -> nn.Module:
    """Scale the weights so that every block changes its input; the weights of norms stay near 1."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return model.double().eval()


def hugging_face(kind: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return awake(getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**options)))


def towers(kind: str, text: dict[str, Any] = TEXT, vision: dict[str, Any] = VISION, **options: Any) -> Any:
    return hugging_face(kind, text_config=text, vision_config=vision, **options)


def open_clip(kind: str = "CLIP", **vision: Any) -> Any:
    library = pytest.importorskip("open_clip")
    vision = {"image_size": 32, "patch_size": 8, "width": 16, "layers": 2, "head_width": 8, **vision}
    return awake(getattr(library, kind)(12, vision, {"width": 16, "heads": 2, "layers": 1, "context_length": 12}))


def coca() -> Any:
    library = pytest.importorskip("open_clip")
    text = {"width": 16, "heads": 2, "layers": 1, "context_length": 12}
    vision = {"image_size": 32, "patch_size": 8, "width": 16, "layers": 2, "head_width": 8, "attn_pooler_heads": 2}
    decoder = {**text, "embed_cls": True, "output_tokens": True}
    return awake(library.CoCa(12, text, decoder, {**vision, "attentional_pool": True, "output_tokens": True}))


def timm(name: str, **options: Any) -> Any:
    return awake(pytest.importorskip("timm").create_model(name, **options))


def resnet() -> nn.Module:
    model = torchvision.models.resnet18(weights=None)
    model.fc = nn.Identity()
    return awake(model)


class Own(nn.Module):
    """User-defined towers with the attribute names of open_clip."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
        self.project, self.words = nn.Linear(8, 6), nn.Embedding(30, 6)

    def encode_image(self, pictures: Tensor) -> Tensor:
        return self.project(self.visual(pictures).mean((2, 3)))

    def encode_text(self, tokens: Tensor) -> Tensor:
        return self.words(tokens).mean(1)

    def tokenizer(self, sentences: list[str]) -> Tensor:
        return torch.tensor([[len(word) for word in sentence.split()][:2] for sentence in sentences])


def get_features(model: Any, pictures: Tensor) -> Tensor:
    image_features = model.get_image_features(pixel_values=pictures)
    return image_features if isinstance(image_features, Tensor) else image_features.pooler_output


def get_patch_features(model: Any, pictures: Tensor) -> Tensor:
    """Return the features of SigLIP 2, which takes flattened patches in row order, channels last."""
    rows = []
    for picture in pictures:
        corners = [(top, left) for top in range(0, 32, 8) for left in range(0, 32, 8)]
        patches = [picture[:, top : top + 8, left : left + 8].permute(1, 2, 0).flatten() for top, left in corners]
        rows.append(torch.stack(patches))
    shapes, mask = torch.tensor([[4, 4]] * len(rows)), torch.ones(len(rows), 16, dtype=torch.int64)
    image_features = model.get_image_features(torch.stack(rows), pixel_attention_mask=mask, spatial_shapes=shapes)
    return image_features.pooler_output


def encode(model: Any, pictures: Tensor) -> Tensor:
    return model.encode_image(pictures)


def pooled(model: Any, pictures: Tensor) -> Tensor:
    return model(pictures).pooler_output.flatten(1)


def run(model: Any, pictures: Tensor) -> Tensor:
    return model(pictures)


@dataclass(frozen=True)
class Case:
    """A model with its expected properties.

    The function that returns its vectors, a layer, the number of tokens before its grid (None for a map), whether its
    default method is Grad-ECLIP, and the first layer, whose outputs are the patches.
    """

    make: Callable[[], Any]
    embed: Callable[[Any, Tensor], Tensor]
    layer: str
    prefix: int | None
    is_transformer: bool
    first: str


LAYERS = "vision_model.encoder.layers"
PATCHES = "vision_model.embeddings.patch_embedding"
PROJECTION = "embeddings.patch_embeddings.projection"
BLOCKS = "visual.transformer.resblocks.1"
DINO = {**VISION, "mlp_ratio": 2}
REGISTERS = {"num_register_tokens": 4}
NUM_PATCHES = {**SIZE, "num_patches": 16, "patch_size": 8}
ALIGN = {
    "image_size": 32,
    "width_coefficient": 0.25,
    "depth_coefficient": 0.3,
    "hidden_dim": 64,
    "depthwise_padding": [],
}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
STAGES = {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 2, 1]}
VIT = {"num_classes": 0, "img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def first_token(model: Any, pictures: Tensor) -> Tensor:
    return model(pictures).last_hidden_state[:, 0]


def features_before_classifier(model: Any, pictures: Tensor) -> Tensor:
    return model.forward_head(model.forward_features(pictures), pre_logits=True)


def make_vit() -> Any:
    return awake(pytest.importorskip("transformers").ViTModel(_config("ViT"), add_pooling_layer=False))


def make_align() -> Any:
    return towers("Align", vision=ALIGN, projection_dim=80)


def make_alt_clip() -> Any:
    return towers("AltCLIP", {**TEXT, "project_dim": 16}, projection_dim=12)


def make_clip_resnet() -> Any:
    return open_clip(layers=(1, 1, 1, 1), width=8, head_width=16)


CASES = {
    "CLIP": Case(lambda: towers("CLIP", projection_dim=12), get_features, f"{LAYERS}.1.layer_norm1", 1, True, PATCHES),
    "SigLIP": Case(lambda: towers("Siglip"), get_features, f"{LAYERS}.1", 0, True, PATCHES),
    "SigLIP 2": Case(
        lambda: towers("Siglip2", vision=NUM_PATCHES), get_patch_features, f"{LAYERS}.1", 0, True, PATCHES
    ),
    "AltCLIP": Case(make_alt_clip, get_features, f"{LAYERS}.0", 1, True, PATCHES),
    "Chinese CLIP": Case(
        lambda: towers("ChineseCLIP", projection_dim=12), get_features, f"{LAYERS}.0", 1, True, PATCHES
    ),
    "ALIGN": Case(
        make_align, get_features, "vision_model.encoder.blocks.3", None, False, "vision_model.embeddings.convolution"
    ),
    "DINOv2": Case(lambda: hugging_face("Dinov2", **DINO), pooled, "encoder.layer.1.norm1", 1, True, PROJECTION),
    "DINOv2 with registers": Case(
        lambda: hugging_face("Dinov2WithRegisters", **DINO, **REGISTERS),
        *(pooled, "encoder.layer.1.norm1", 5, True, PROJECTION),
    ),
    "DINOv3": Case(
        lambda: hugging_face("DINOv3ViT", **VISION, **REGISTERS),
        *(pooled, "model.layer.1.norm1", 5, True, "embeddings.patch_embeddings"),
    ),
    "DINOv3, ConvNeXt": Case(
        lambda: hugging_face("DINOv3ConvNext", **STAGES),
        *(pooled, "model.stages.2", None, False, "model.stages.0.downsample_layers.0"),
    ),
    "ViT without pooling": Case(make_vit, first_token, "layers.1.layernorm_before", 1, True, PROJECTION),
    "ResNet": Case(
        lambda: hugging_face("ResNet", **RESNET),
        *(pooled, "encoder.stages.1", None, False, "embedder.embedder.convolution"),
    ),
    "open_clip": Case(open_clip, encode, f"{BLOCKS}.ln_1", 1, True, "visual.conv1"),
    "open_clip, mean": Case(lambda: open_clip(pool_type="avg"), encode, BLOCKS, 1, True, "visual.conv1"),
    "open_clip, ResNet": Case(make_clip_resnet, encode, "visual.layer2", None, False, "visual.conv1"),
    "CoCa": Case(coca, encode, BLOCKS, 1, True, "visual.conv1"),
    "timm, registers": Case(
        lambda: timm("vit_small_patch14_reg4_dinov2", **VIT), run, "blocks.1.norm1", 5, True, "patch_embed.proj"
    ),
    "timm, rotated places": Case(
        lambda: timm("eva02_tiny_patch14_224", **VIT), run, "blocks.1", 1, True, "patch_embed.proj"
    ),
    "timm, ResNet": Case(lambda: timm("resnet10t", num_classes=0), run, "layer3", None, False, "conv1.0"),
    "timm, with a classifier": Case(
        lambda: timm("resnet10t", num_classes=7), features_before_classifier, "layer3", None, False, "conv1.0"
    ),
    "any module": Case(resnet, run, "layer3", None, False, "conv1"),
    "own towers": Case(lambda: Own().double().eval(), encode, "visual.2", None, False, "visual.0"),
}


def _config(kind: str) -> Any:
    return getattr(pytest.importorskip("transformers"), f"{kind}Config")(**VISION)


@functools.cache
def make_model(kind: str) -> Any:
    return CASES[kind].make()


def draw(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def look(case: Case, model: Any, pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of a layer and the vectors, with the graph of the full model."""
    results: list[Tensor] = []
    handle = model.get_submodule(case.layer).register_forward_hook(lambda *args: results.append(args[2]))
    vectors = case.embed(model, pictures.clone().requires_grad_())
    handle.remove()
    output = results[0][0] if isinstance(results[0], tuple) else results[0]
    return output, vectors


def lay(case: Case, tensor: Tensor) -> Tensor:
    if case.prefix is None:
        return tensor
    side = round((tensor.shape[1] - case.prefix) ** 0.5)
    return tensor[:, case.prefix :].transpose(1, 2).unflatten(2, (side, side))


def slow_maps(case: Case, output: Tensor, scores: Tensor, method: str) -> Tensor:
    """Compute maps (N,K,h,w) of scores (N,K) by Grad-CAM or HiResCAM."""
    rows = []
    for k in range(scores.shape[1]):
        (gradient,) = torch.autograd.grad(scores[:, k].sum(), output, retain_graph=True)
        values, slopes = lay(case, output.detach()), lay(case, gradient)
        weights = slopes.mean((2, 3), keepdim=True) if method == "gradcam" else slopes
        rows.append((weights * values).sum(1).relu())
    return torch.stack(rows, 1)


def assert_maps(maps: Tensor, expected: Tensor) -> None:
    peak = expected.max().item()
    assert peak > 0
    torch.testing.assert_close(maps.double(), expected, rtol=1e-6, atol=1e-6 * peak)


@pytest.mark.parametrize("method", ["gradcam", "hirescam"])
@pytest.mark.parametrize("kind", CASES)
def test_maps_of_sentences_equal_autograd_through_the_whole_graph(kind: str, method: str) -> None:
    case, model = CASES[kind], make_model(kind)
    output, vectors = look(case, model, PICTURES)
    sentences, against = draw(3, vectors.shape[1]), draw(2, vectors.shape[1], seed=3)
    units = vectors / vectors.square().sum(1, keepdim=True).sqrt()
    cosines = torch.stack([units @ (sentence / sentence.norm()) for sentence in sentences], 1)
    rivals = torch.stack([units @ (item / item.norm()) for item in against], 1).mean(1, keepdim=True)
    for target, scores in ((Text(sentences), cosines), (Text(sentences, against=against), cosines - rivals)):
        explanation = gradcam.explain(model, PICTURES, case.layer, method=method, target=target)
        assert_maps(explanation.maps, slow_maps(case, output, scores, method))
        torch.testing.assert_close(explanation.scores.double(), scores.detach(), rtol=1e-6, atol=1e-7)
        assert (explanation.layer, explanation.classes) == (case.layer, None)
        message = torch.tensor([[item.score for item in row] for row in explanation.instances], dtype=torch.float64)
        torch.testing.assert_close(message, cosines.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", CASES)
def test_maps_of_a_likeness_lie_on_both_pictures(kind: str) -> None:
    case, model = CASES[kind], make_model(kind)
    second_picture = draw(3, 32, 32, seed=5)
    output, vectors = look(case, model, PICTURES)
    second_activations, reference = look(case, model, second_picture[None])
    cosines = F.cosine_similarity(vectors, reference.detach())[:, None]
    explanation = gradcam.explain(model, PICTURES, case.layer, method="hirescam", target=Like(second_picture))
    assert_maps(explanation.maps, slow_maps(case, output, cosines, "hirescam"))
    torch.testing.assert_close(explanation.scores.double(), cosines.detach(), rtol=1e-6, atol=1e-7)
    from_there = torch.stack([F.cosine_similarity(reference, vector.detach()[None]) for vector in vectors], 1)
    assert explanation.reference is not None
    assert_maps(explanation.reference.maps, slow_maps(case, second_activations, from_there, "hirescam"))
    torch.testing.assert_close(explanation.reference.scores, explanation.scores.T, rtol=1e-5, atol=1e-6)
    kinds = [[(item.kind, item.name) for item in row] for row in explanation.instances]
    assert kinds == [[("like", "reference")]] * 2


@pytest.mark.parametrize("kind", CASES)
def test_the_method_is_that_of_the_tower(kind: str) -> None:
    case, model = CASES[kind], make_model(kind)
    vectors = draw(2, case.embed(model, PICTURES).shape[1])
    before = traces(model)
    explanation = gradcam.explain(model, PICTURES, target=Text(vectors))
    has_mean = kind in ("open_clip, mean", "timm, rotated places")
    assert explanation.method == ("grad-eclip" if case.is_transformer and not has_mean else "gradcam")
    assert explanation.maps.any()
    assert explanation.heatmaps.shape == (2, 2, 32, 32)
    assert_same(before, traces(model))
    assert case.is_transformer or explanation.layer in dict(model.named_modules())


PAINTED = (slice(16, 24), slice(8, 16))  # rows and columns of pixels: one patch, at a position without symmetry


@pytest.mark.parametrize("kind", CASES)
def test_evidence_lies_on_the_painted_square(kind: str) -> None:
    """Check that the evidence lies on the square.

    The first layer has no bias, so it is zero wherever the image is black.
    """
    case, model = CASES[kind], make_model(kind)
    first = model.get_submodule(case.first)
    bias = getattr(first, "bias", None)
    saved_bias = None if bias is None else bias.detach().clone()
    if bias is not None:
        bias.data.zero_()
    picture = torch.zeros(1, 3, 32, 32, dtype=torch.float64)
    picture[(0, slice(None), *PAINTED)] = draw(3, 8, 8, seed=7)
    vectors = draw(8, case.embed(model, picture).shape[1], seed=8)
    maps = gradcam.explain(model, picture, case.first, method="hirescam", target=Text(vectors)).maps
    if saved_bias is not None:
        bias.data.copy_(saved_bias)
    side = maps.shape[-1]
    reach = 0 if side == 4 else 3 * side // 32 + 2  # the cells of a convolution beside the square also see part of it
    rows, columns = (slice(item.start * side // 32 - reach, item.stop * side // 32 + reach) for item in PAINTED)
    inside = maps[..., max(rows.start, 0) : rows.stop, max(columns.start, 0) : columns.stop].sum()
    assert maps.sum() > 0
    assert inside / maps.sum() > 1 - 1e-6


# Attention methods, against loops over recorded attention


def eager(kind: str) -> Any:
    """Return the model with eager attention, which exposes the attention probabilities."""
    model = copy.deepcopy(make_model(kind))
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return model


def open_tower(kind: str, model: Any) -> slow.Anatomy:
    if kind.startswith("timm"):
        return slow.open_timm(model, PICTURES)
    tower = getattr(model, "vision_model", model)
    output = tower(PICTURES, output_attentions=True, output_hidden_states=True)
    heads: dict[str, Callable[[Tensor], Tensor]] = {
        "CLIP": lambda tokens: model.visual_projection(tower.post_layernorm(tokens[:, 0])),
        "SigLIP": lambda tokens: tower.head(tower.post_layernorm(tokens)),
        "DINOv2 with registers": lambda tokens: tower.layernorm(tokens)[:, 0],
        "DINOv3": lambda tokens: tower.norm(tokens)[:, 0],
    }
    return slow.Anatomy(output.attentions, output.hidden_states[1:], heads[kind])


@pytest.mark.parametrize("kind", ["CLIP", "SigLIP", "DINOv2 with registers", "DINOv3", "timm, registers"])
def test_legrad_and_rollouts_equal_the_loops(kind: str) -> None:
    case, prefix = CASES[kind], CASES[kind].prefix
    plain = open_tower(kind, eager(kind))
    vectors = draw(2, plain.head(plain.outputs[-1]).shape[1])

    def head(tokens: Tensor) -> Tensor:
        return torch.stack([F.cosine_similarity(plain.head(tokens), vector[None]) for vector in vectors], 1)

    anatomy = slow.Anatomy(plain.attentions, plain.outputs, head)
    read = list(range(16)) if kind == "SigLIP" else [0]
    for method in ("legrad", "gradient-rollout", "rollout"):
        maps = gradcam.explain(make_model(kind), PICTURES, method=method, target=Text(vectors)).maps
        assert prefix is not None
        assert_maps(maps, slow.maps(method, anatomy, [[0, 1]] * 2, read, (4, 4)))
    assert case.is_transformer


def look_into_head(model: Any, pictures: Tensor) -> tuple[Attention, Tensor]:
    """Compute the head of SigLIP by hand: it pools by attention, with one probe as the query for all tokens."""
    tokens = model.vision_model(pictures).last_hidden_state
    head, rows = model.vision_model.head, len(pictures)
    inner = head.attention
    weights, biases = inner.in_proj_weight.chunk(3), inner.in_proj_bias.chunk(3)
    attention_inputs = [head.probe.expand(rows, -1, -1), tokens, tokens]
    query, key, value = (
        F.linear(values, weight, bias).unflatten(-1, (2, 8)).transpose(1, 2)
        for values, weight, bias in zip(attention_inputs, weights, biases)
    )
    attention = Attention(query, key, value, attend(query, key, value))
    pooled_token = inner.out_proj(attention.output.transpose(1, 2).flatten(2))
    return attention, (pooled_token + head.mlp(head.layernorm(pooled_token)))[:, 0]


ECLIP = ["CLIP", "SigLIP", "open_clip", "DINOv2 with registers", "DINOv3", "timm, registers", "timm, rotated places"]


@pytest.mark.parametrize("count", [2, 6])
@pytest.mark.parametrize("kind", ECLIP)
def test_grad_eclip_equals_the_loops(kind: str, count: int) -> None:
    case, model = CASES[kind], make_model(kind)
    if kind == "SigLIP":
        attention, vectors = look_into_head(model, PICTURES)
    else:
        attentions, vectors = look_at_attention(lambda: case.embed(model, PICTURES))
        attention = attentions[-1]
    sentences = draw(count, vectors.shape[1])
    scores = torch.stack([F.cosine_similarity(vectors, sentence[None]) for sentence in sentences], 1)
    assert case.prefix is not None
    expected = eclip_maps(attention, scores, [list(range(count))] * 2, case.prefix, (4, 4))
    for _ in range(2):
        assert_maps(gradcam.explain(model, PICTURES, method="grad-eclip", target=Text(sentences)).maps, expected)


# Other outputs, and models that cannot be read


class ConvWithOutput(nn.Module):
    """A convolution with any form of output."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.wrap = nn.Conv2d(3, 6, 8, 8), wrap
        self.double().eval()

    def forward(self, pictures: Tensor) -> Any:
        return self.wrap(self.conv(pictures))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda maps: maps.mean((2, 3)),
        lambda maps: maps.mean((2, 3), keepdim=True),
        lambda maps: maps,
        lambda maps: maps.flatten(2).transpose(1, 2),
        lambda maps: (maps, maps.mean((2, 3))),
        lambda maps: {"image_features": maps.mean((2, 3)), "other": maps[:, :2, 0, 0]},
        lambda maps: [maps[:, :2], maps],
    ],
)
def test_outputs_of_other_forms(wrap: Callable[[Tensor], Any]) -> None:
    model, vector = ConvWithOutput(wrap), draw(6)
    scores = gradcam.explain(model, PICTURES, "conv", method="hirescam", target=Text(vector)).scores
    expected = F.cosine_similarity(model.conv(PICTURES).mean((2, 3)), vector[None])
    torch.testing.assert_close(scores.double()[:, 0], expected.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("wrap", [lambda maps: maps.mean((1, 2, 3)), lambda _: "nothing"])
def test_outputs_without_vectors(wrap: Callable[[Tensor], Any]) -> None:
    with pytest.raises(TargetError, match=r"The model returned .*, expected one vector per image \(N, D\)"):
        gradcam.explain(ConvWithOutput(wrap), PICTURES, "conv", target=Text(draw(6)))


def test_vectors_of_another_length() -> None:
    with pytest.raises(TargetError, match=r"The model returned \(2, 512\) for 2 image\(s\), expected \(2, 6\)"):
        gradcam.explain(make_model("any module"), PICTURES, "layer3", target=Like(draw(6)))


class Wrapper(nn.Module):
    """A user's model around a supported one."""

    def __init__(self, inner: nn.Module, ask: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.ask = inner, ask

    def forward(self, pictures: Tensor) -> Any:
        return self.ask(self.inner, pictures * 0.5)


@pytest.mark.parametrize("kind", ["CLIP", "SigLIP", "open_clip", "DINOv2"])
def test_models_around_a_known_one(kind: str) -> None:
    case, model = CASES[kind], make_model(kind)
    outer = Wrapper(model, case.embed)
    vectors = draw(2, case.embed(model, PICTURES).shape[1])
    explanation = gradcam.explain(outer, PICTURES, f"inner.{case.layer}", method="hirescam", target=Text(vectors))
    expected = gradcam.explain(model, PICTURES * 0.5, case.layer, method="hirescam", target=Text(vectors))
    torch.testing.assert_close(explanation.maps, expected.maps, rtol=1e-6, atol=1e-8)
    assert gradcam.explain(outer, PICTURES, target=Text(vectors)).method == "grad-eclip"


def test_a_classifiers_backbone_gives_the_vector() -> None:
    transformers = pytest.importorskip("transformers")
    model = awake(transformers.ViTForImageClassification(_config("ViT")))
    expected = model.vit(PICTURES).last_hidden_state[:, 0]
    scores = gradcam.explain(model, PICTURES, target=Like(draw(16))).scores.double()[:, 0]
    torch.testing.assert_close(scores, F.cosine_similarity(expected, draw(1, 16)).detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["CLIP", "open_clip"])
def test_pictures_beside_other_arguments(kind: str) -> None:
    case, model = CASES[kind], make_model(kind)
    target = Text(draw(2, 12))
    expected = gradcam.explain(model, PICTURES, case.layer, target=target).maps
    words = torch.zeros(2, 5, dtype=torch.int64)
    for inputs in ({"pixel_values": PICTURES, "input_ids": words}, (words, PICTURES), list(PICTURES)):
        torch.testing.assert_close(gradcam.explain(model, inputs, case.layer, target=target).maps, expected)
    with pytest.raises(ImageError, match="different sizes"):
        gradcam.explain(model, [PICTURES[0], PICTURES[0, :, :16]], case.layer, target=target)


def test_pictures_larger_than_the_models() -> None:
    model = make_model("CLIP")
    large = draw(1, 3, 40, 48)
    vectors = model.get_image_features(pixel_values=large, interpolate_pos_encoding=True).pooler_output
    inputs = {"pixel_values": large, "interpolate_pos_encoding": True}
    explanation = gradcam.explain(model, inputs, target=Text(draw(12)))
    assert explanation.maps.shape == (1, 1, 5, 6)
    expected = F.cosine_similarity(vectors, draw(1, 12)).detach()
    torch.testing.assert_close(explanation.scores.double()[:, 0], expected, rtol=1e-6, atol=1e-7)


def test_windows_are_no_plain_transformer() -> None:
    transformers = pytest.importorskip("transformers")
    options = {"patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
    swin = transformers.SwinModel(transformers.SwinConfig(image_size=32, **options))
    assert not find_embedder(swin).is_transformer
    assert find_embedder(make_model("DINOv3")).is_transformer


@pytest.mark.parametrize("is_after", [False, True])
def test_a_mean_of_tokens_is_explained_where_it_is_taken(is_after: bool) -> None:
    """Check that the averaged layer is explained: all its tokens have the same gradient, so many sentences are cheap."""
    model = open_clip(pool_type="avg", final_ln_after_pool=is_after)
    explanation = gradcam.explain(model, PICTURES, target=Text(draw(3, 12)))
    layer = "visual.transformer" if is_after else "visual.ln_post"
    assert (explanation.method, explanation.layer) == ("gradcam", layer)
    by_cell = gradcam.explain(model, PICTURES, explanation.layer, target=Text(draw(3, 12)), method="hirescam")
    torch.testing.assert_close(explanation.maps, by_cell.maps, rtol=1e-5, atol=1e-9)
