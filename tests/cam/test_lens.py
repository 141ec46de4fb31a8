"""Test the logit lens against the logits of models whose last blocks are removed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.errors import GradcamError
from gradcam.targets import Token

T: Any = pytest.importorskip("transformers")
IMAGE, WORDS, BLOCKS = 150, [11, 12, 13], 3
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": BLOCKS}
TEXT = SMALL | {"vocab_size": 200, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def prepare(model: Any, prompt: list[int], **inputs: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """Return a model with large random weights, and the inputs, in float64."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "norm" not in name.lower():
            deviation = 0.3 if parameter.ndim < 2 else 1.5 / math.sqrt(parameter[0].numel())
            parameter.data = torch.randn(parameter.shape, generator=generator) * deviation
    ids = torch.tensor([prompt])
    return model.double().eval(), {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}


def make_llava() -> tuple[Any, dict[str, Tensor]]:
    vision = SMALL | {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7, "projection_dim": 32}
    config = T.LlavaConfig(vision_config=vision, text_config=TEXT | {"model_type": "llama"}, image_token_index=IMAGE)
    prompt = [1, 5, *[IMAGE] * 16, 6, *[IMAGE] * 16, 7]
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, 3, 28, 28, generator=generator, dtype=torch.float64)
    return prepare(T.LlavaForConditionalGeneration(config), prompt, pixel_values=pixels)


def make_qwen() -> tuple[Any, dict[str, Tensor]]:
    rope = {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = TEXT | {"rope_parameters": rope, "rope_scaling": rope, "max_position_embeddings": 512}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 14}
    tokens = {"image_token_id": IMAGE, "video_token_id": 151, "vision_start_token_id": 152, "vision_end_token_id": 153}
    model = T.Qwen2VLForConditionalGeneration(T.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens))
    prompt = [1, 152, *[IMAGE] * 24, 153, 152, *[IMAGE] * 24, 153, 7]
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2 * 96, 3 * 2 * 14 * 14, generator=generator, dtype=torch.float64)
    types = (torch.tensor([prompt]) == IMAGE).long()
    grids = torch.tensor([[1, 8, 12], [1, 8, 12]])
    return prepare(model, prompt, mm_token_type_ids=types, pixel_values=pixels, image_grid_thw=grids)


MODELS = {"llava": (make_llava, (4, 4)), "qwen": (make_qwen, (4, 6))}


def read_by_hand(model: Any, inputs: Mapping[str, Tensor], blocks: int) -> Tensor:
    """Return the logits (T,V) at the image tokens of a model with this number of blocks."""
    short = copy.deepcopy(model)
    short.model.language_model.layers = short.model.language_model.layers[:blocks]
    short.config.get_text_config().num_hidden_layers = blocks
    logits: Tensor = short(**inputs, use_cache=False).logits[0][inputs["input_ids"][0] == IMAGE].detach()
    return logits


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("name", MODELS)
def test_maps_are_the_logits_of_a_shorter_model(name: str, block: int) -> None:
    make, grid = MODELS[name]
    model, inputs = make()
    layer = f"model.language_model.layers.{block}"
    options: Any = {"method": "lens", "target": Token(WORDS)}
    explanation = gradcam.explain(model, inputs, layer, **options)
    probabilities = read_by_hand(model, inputs, block + 1).softmax(1)[:, WORDS].unflatten(0, (2, *grid))
    torch.testing.assert_close(explanation.maps, probabilities.movedim(-1, 1).float())
    if block == BLOCKS - 1:
        after_norm = gradcam.explain(model, inputs, "model.language_model.norm", **options)
        torch.testing.assert_close(after_norm.maps, explanation.maps)


def test_phrases_and_alternatives() -> None:
    model, inputs = make_llava()
    logits = read_by_hand(model, inputs, BLOCKS)[:16].unflatten(0, (4, 4)).float()

    both = logits.softmax(-1)

    def explain(target: Token) -> Tensor:
        layer = f"model.language_model.layers.{BLOCKS - 1}"
        return gradcam.explain(model, inputs, layer, method="lens", target=target).maps[0, 0]

    torch.testing.assert_close(explain(Token(WORDS, [(0, 2)])), (both[..., 11] * both[..., 13]).sqrt())
    torch.testing.assert_close(explain(Token(WORDS, 1, against=20)), (logits[..., 12] - logits[..., 20]).relu())


def test_lens_needs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    model, inputs = make_llava()
    explanation = gradcam.explain(model, inputs, method="lens", target=Token(WORDS))
    assert explanation.layer.startswith("model.language_model.layers.")
    assert explanation.maps.shape == (2, 3, 4, 4)
    assert explanation.maps.amin() >= 0
    assert explanation.heatmaps.amax() == 1


def test_lens_and_gradients_share_a_layer() -> None:
    model, inputs = make_llava()
    layers, methods = ["model.language_model.layers.0"], ["hirescam", "lens"]
    explanations = gradcam.compare(model, inputs, layers=layers, methods=methods, target=Token(WORDS))
    for (layer, method), explanation in explanations.items():
        alone = gradcam.explain(model, inputs, layer, method=method, target=Token(WORDS))
        torch.testing.assert_close(explanation.maps, alone.maps)


def make_florence() -> tuple[Any, dict[str, Tensor]]:
    vision = {
        "embed_dim": [16, 32], "num_heads": [2, 2], "num_groups": [2, 2], "depths": [1, 1], "patch_size": [7, 3],
        "patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False, True], "window_size": 2,
        "projection_dim": 32, "max_temporal_embeddings": 10, "max_position_embeddings": 20,
    }  # fmt: skip
    text = {
        "model_type": "bart", "vocab_size": 200, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "decoder_start_token_id": 2, "forced_eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    florence = pytest.importorskip("transformers", "4.56")
    config = florence.Florence2Config(vision_config=vision, text_config=text, image_token_id=IMAGE)
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = florence.Florence2ForConditionalGeneration(config)
    return prepare(model, [*[IMAGE] * 17, 1, 7, 2], pixel_values=pixels)


@pytest.mark.parametrize(
    ("make", "layer", "target", "message"),
    [
        (make_llava, "model.multi_modal_projector", Token(WORDS), r"'model\.multi_modal_projector' is not one of its"),
        (
            make_llava,
            "model.language_model.layers.1.mlp",
            Token(WORDS),
            r"choose one of 'model\.language_model\.layers\.0'",
        ),
        (make_llava, None, lambda output: output.logits[:, -1, 5], r"pass gradcam\.targets\.Token"),
        (make_florence, None, Token(WORDS), "Florence2ForConditionalGeneration has no decoder-only"),
    ],
)
def test_refusals(make: Callable[[], tuple[Any, Any]], layer: str | None, target: Any, message: str) -> None:
    model, inputs = make()
    with pytest.raises(GradcamError, match=message) as caught:
        gradcam.explain(model, inputs, layer, method="lens", target=target)
    assert "\n" not in str(caught.value)


def test_classifiers_have_no_words() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
    for layer in (None, "1"):
        with pytest.raises(GradcamError, match="The method 'lens' explains words of vision-language models"):
            gradcam.explain(model, torch.rand(1, 3, 16, 16), layer, method="lens")


def test_offloaded_embeddings_are_refused() -> None:
    model, inputs = make_llava()
    head = model.get_output_embeddings()
    weight = head.weight.detach()
    head.weight = nn.Parameter(weight.to("meta"))
    head.forward = lambda features: features @ weight.T
    with pytest.raises(GradcamError, match="output embeddings, which are offloaded"):
        gradcam.explain(model, inputs, method="lens", target=Token(WORDS))
