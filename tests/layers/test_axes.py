"""Inputs whose axis sizes coincide: as many images as tokens, text next to images, as many channels as rows."""

from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

import gradcam
from gradcam.cam.listing import list_layers
from gradcam.errors import LayerError
from tests import oracles
from tests.helpers import FunctionModule

SMALL_TRANSFORMER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SMALL_VISION = {**SMALL_TRANSFORMER, "image_size": 32, "patch_size": 8}  # 16 patches and a class token


class Encoder(nn.Module):
    """A vision transformer on PyTorch's built-in layers, with 16 patches and a class token."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.patches, self.cls = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.randn(1, 1, 16))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(tokens), -1, -1), tokens], 1)
        x = tokens if self.batch_first else tokens.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 1:].mean(1) if self.batch_first else x[1:].mean(0))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("method", ["gradcam", "eigencam", "rollout", "gradient-rollout"])
def test_a_batch_of_as_many_images_as_tokens_gives_the_maps_of_smaller_batches(method: str, batch_first: bool) -> None:
    model, images = Encoder(batch_first=batch_first).eval(), torch.randn(17, 3, 32, 32)
    together = gradcam.explain(model, images, "layers.0", method=method, target=1)
    halves = [gradcam.explain(model, half, "layers.0", method=method, target=1).maps for half in images.split(9)]
    torch.testing.assert_close(together.maps, torch.cat(halves), rtol=1e-4, atol=1e-6)


def test_tokens_first_uses_the_gradient_of_each_image() -> None:
    model, images = Encoder(batch_first=False).eval(), torch.randn(17, 3, 32, 32)
    output, gradient = oracles.reference(model, images, ["layers.0"], lambda output: output[:, 1].sum())["layers.0"]
    values, weights = output[1:], gradient[1:].mean(0)  # (16,N,D) and (N,D)
    expected = torch.einsum("tnd,nd->nt", values, weights).relu().unflatten(1, (4, 4))
    explanation = gradcam.explain(model, images, "layers.0", target=1)
    torch.testing.assert_close(explanation.maps[:, 0], expected, rtol=1e-4, atol=1e-6)
    grid = gradcam.explain(model, images, "layers.0", target=1, reshape=(4, 4))
    torch.testing.assert_close(grid.maps, explanation.maps)


def test_listing_layers_and_activations_resolve_the_batch_axis_as_well() -> None:
    model, images = Encoder(batch_first=False).eval(), torch.randn(17, 3, 32, 32)
    for candidate in (model, Encoder(batch_first=False).to("meta")):
        rows = {row.name: row for row in list_layers(candidate, images)}
        assert (rows["layers.0"].grid, rows["layers.0"].cam) == ((4, 4), True)
    grids = gradcam.inspection.activations(model, images, "layers.0")["layers.0"]
    alone = gradcam.inspection.activations(model, images[:1], "layers.0")["layers.0"]
    torch.testing.assert_close(grids[:1], alone, rtol=1e-4, atol=1e-5)


class Windows(nn.Module):
    """A model that splits its map into four windows of 16 cells, stacked in the batch axis, and joins them again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).movedim(1, -1)  # (N,8,8,C)
        windows = x.unflatten(2, (2, 4)).unflatten(1, (2, 4)).transpose(2, 3).reshape(-1, 16, 8)
        return self.head(self.norm(windows).unflatten(0, (len(images), 4)).mean((1, 2)))


@pytest.mark.parametrize("images", [16, 5])
def test_as_many_images_as_cells_of_a_window_are_no_tokens(images: int) -> None:
    model, pictures = Windows().eval(), torch.randn(images, 3, 32, 32)
    with pytest.raises(LayerError, match=rf"for {images} image\(s\): its first axis is not the batch"):
        gradcam.explain(model, pictures, "norm", target=1)
    rows = {row.name: row for row in list_layers(model, pictures)}
    assert rows["norm"].reason == "its first axis is not the batch"
    assert gradcam.explain(model, pictures, target=1).layer == "stem"


class Stubborn(Encoder):
    def forward(self, images: Tensor) -> Tensor:
        if len(images) != 17:
            raise ValueError("17 images")
        return super().forward(images)


def test_a_model_that_rejects_other_batch_sizes_needs_a_reshape() -> None:
    model, images = Stubborn(batch_first=False).eval(), torch.randn(17, 3, 32, 32)
    with pytest.raises(LayerError, match=r"returns \(17, 17, 16\)"):
        gradcam.explain(model, images, "layers.0", target=1)
    explanation = gradcam.explain(model, images, "layers.0", target=1, reshape="tokens first")
    plain = Encoder(batch_first=False).eval()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(explanation.maps, gradcam.explain(plain, images, "layers.0", target=1).maps)


def caption(decoder: str) -> nn.Module:
    words = {"vocab_size": 50, "add_cross_attention": True, "is_decoder": True}
    if decoder == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
        config = transformers.GPT2Config(**sizes, **words)
    else:
        sizes = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
        config = transformers.TrOCRConfig(**sizes, max_position_embeddings=64, cross_attention_hidden_size=16, **words)
    vision = transformers.ViTConfig(**SMALL_VISION)
    both = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, config)
    return transformers.VisionEncoderDecoderModel(both).eval()


def last_word(output: Any) -> Tensor:
    return output.logits[:, -1].amax(-1, keepdim=True)


def words(length: int) -> Tensor:
    return torch.randint(3, 50, (1, length), generator=torch.Generator().manual_seed(length))


LENGTHS = (1, 2, 4, 5, 9, 16, 17, 18, 20)


@pytest.mark.parametrize("decoder", ["gpt2", "trocr"])
def test_caption_tokens_are_rejected_at_every_length(decoder: str) -> None:
    model, images = caption(decoder), torch.randn(1, 3, 32, 32)
    for length in LENGTHS:
        inputs = {"pixel_values": images, "decoder_input_ids": words(length)}
        refused = "axis is not the batch|with text tokens" if length == 1 else "with text tokens"
        with pytest.raises(LayerError, match=f"{refused}|no spatial grid|not certain" if length < 4 else refused):
            gradcam.explain(model, inputs, "decoder", target=last_word)
        explanation = gradcam.explain(model, inputs, target=last_word)
        assert (explanation.layer, explanation.maps.shape[2:]) == ("encoder.layernorm", (4, 4))


def test_a_sequence_of_image_and_text_tokens_is_rejected() -> None:
    text = {"vocab_size": 50, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GitConfig(vision_config=SMALL_VISION, **text, **SMALL_TRANSFORMER)
    model = transformers.GitForCausalLM(config).eval()
    for length in LENGTHS[1:]:
        ids = words(length)
        inputs = {"pixel_values": torch.randn(1, 3, 32, 32), "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for layer in ("git.encoder", "output"):  # the image's 17 tokens, then the text tokens
            with pytest.raises(LayerError, match="with text tokens"):
                gradcam.explain(model, inputs, layer, target=last_word)
        assert gradcam.explain(model, inputs, target=last_word).layer == "git.visual_projection"
    rows = {row.name: row for row in list_layers(model, inputs)}
    assert rows["git.encoder"].reason == "its tokens include text"
    assert rows["git.visual_projection"].cam


def test_the_last_image_tokens_inside_the_text_are_rejected() -> None:
    text = {"model_type": "llama", "vocab_size": 60, "num_key_value_heads": 2, "max_position_embeddings": 64}
    vision = {**SMALL_VISION, "model_type": "clip_vision_model"}
    config = transformers.LlavaConfig(
        vision_config=vision, text_config={**SMALL_TRANSFORMER, **text}, image_token_index=59
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    for length in (4, 9):
        ids = torch.cat([torch.full((1, 16), 59), words(length)], 1)
        inputs = {"pixel_values": torch.randn(1, 3, 32, 32), "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for layer in ("lm_head", "model.language_model"):
            with pytest.raises(LayerError, match="In the last layer of a text model"):
                gradcam.explain(model, inputs, layer, target=last_word)
        assert gradcam.explain(model, inputs, target=last_word).layer == "model.multi_modal_projector"


def test_an_image_with_as_many_tokens_as_the_text_is_still_explained() -> None:
    ends = {"vocab_size": 50, "max_position_embeddings": 64, "eos_token_id": 49, "bos_token_id": 1}
    text = {**SMALL_TRANSFORMER, **ends}
    config = transformers.CLIPConfig(text_config=text, vision_config=SMALL_VISION, projection_dim=8)
    model, images = transformers.CLIPModel(config).eval(), torch.randn(1, 3, 32, 32)
    maps = {}
    for length in (5, 17):  # the image has 17 tokens
        inputs = {"pixel_values": images, "input_ids": words(length)}
        layer = "vision_model.encoder.layers.0"
        maps[length] = gradcam.explain(model, inputs, layer, target=lambda output: output.image_embeds[:, :1]).maps
        with pytest.raises(LayerError, match="with text tokens|not certain"):
            gradcam.explain(model, inputs, "text_model.encoder.layers.0", target=lambda output: output.logits_per_image)
    torch.testing.assert_close(maps[5], maps[17])


def read_words_and_patches(module: Any, images: Tensor, ids: Tensor) -> Tensor:
    """Run a model that takes exactly 16 words; its layers see the words, the image's patches, or both."""
    if ids.shape[1] != 16:
        raise ValueError("16 words")
    image_tokens = module.seen(module.patches(images).flatten(2).transpose(1, 2))
    return module.head(module.both(torch.cat([image_tokens, module.read(module.words(ids))], 1)).mean(1))


def test_text_of_a_fixed_length_is_recognised_by_its_number_of_tokens() -> None:
    norms = {name: nn.LayerNorm(8) for name in ("seen", "read", "both")}
    parts = {"patches": nn.Conv2d(3, 8, 8, 8), "words": nn.Embedding(50, 8), **norms, "head": nn.Linear(8, 5)}
    model, images = FunctionModule(read_words_and_patches, **parts).eval(), torch.randn(1, 3, 40, 40)  # 25 patches
    for layer in ("read", "both"):
        with pytest.raises(LayerError, match="with text tokens"):
            gradcam.explain(model, (images, words(16)), layer, target=1)
    assert gradcam.explain(model, (images, words(16)), "seen", target=1).maps.shape[2:] == (5, 5)


def channels_last_convnext() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("convnext_tiny", dims=(40, 48, 56, 64), depths=(2, 1, 1, 1), num_classes=5).eval()


@pytest.mark.parametrize("layer", ["norm", "mlp.drop2", "mlp.fc2"])
def test_channels_are_distinguished_from_as_many_rows_and_columns(layer: str) -> None:
    model, images = channels_last_convnext(), torch.randn(2, 3, 160, 160)
    name = f"stages.0.blocks.1.{layer}"
    output, gradient = oracles.reference(model, images, [name], lambda output: output[:, 1].sum())[name]
    assert output.shape == (2, 40, 40, 40)
    expected = torch.einsum("nhwc,nc->nhw", output, gradient.mean((1, 2))).relu()
    explanation = gradcam.explain(model, images, name, target=1)
    torch.testing.assert_close(explanation.maps[:, 0], expected, rtol=1e-3, atol=1e-5 * float(expected.max()))
    rows = {row.name: row for row in list_layers(model, 160)}
    assert (rows[name].cam, rows[name].grid) == (True, (40, 40))


def test_a_norm_over_channels_first_of_as_many_rows_and_columns() -> None:
    torch.manual_seed(0)
    model = timm.create_model("convnext_atto", depths=(2, 1, 1, 1), num_classes=5).eval()
    images, name = torch.randn(1, 3, 160, 160), "stem.1"  # The stem's norm is also a subclass of LayerNorm.
    explanation = gradcam.explain(model, images, name, target=1)
    with_reshape = gradcam.explain(model, images, name, target=1, reshape="channels first")
    torch.testing.assert_close(explanation.maps, with_reshape.maps)
    assert isinstance(model.get_submodule(name), nn.LayerNorm)
