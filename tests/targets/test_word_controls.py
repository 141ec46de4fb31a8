"""Test the controls for the maps of words: a blank image, earlier words, and cells that are hot for every word."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.errors import GradcamWarning, TargetError
from gradcam.hooks.containers import to_batch
from gradcam.targets import Token
from gradcam.targets.word_controls import blank_images, subtract_context, warn_of_sinks

T: Any = pytest.importorskip("transformers")
WORDS = [11, 12, 13, 14]
IMAGE_TOKEN = 50


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    vision = small | {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7, "projection_dim": 32}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = small | ends | {"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 60}
    config = T.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    llava: nn.Module = T.LlavaForConditionalGeneration(config)
    for parameter in llava.parameters():
        parameter.data *= 4  # With the usual small weights, the image hardly changes a probability.
    return llava.double().eval()


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    ids = torch.tensor([[1, 5, *[IMAGE_TOKEN] * 16, 7, 8]])
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def predict_by_hand(model: nn.Module, inputs: dict[str, Tensor], pixels: Tensor) -> list[float]:
    probabilities = []
    for place, word in enumerate(WORDS):
        ids = torch.cat([inputs["input_ids"], torch.tensor([WORDS[:place]], dtype=torch.int64)], 1)
        with torch.no_grad():
            output = model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels)
        probabilities.append(float(output.logits[0, -1].softmax(0)[word]))
    return probabilities


def test_probability_with_a_blank_image(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    explanation = gradcam.explain(model, inputs, target=Token(WORDS, control="blank"))
    pixels = inputs["pixel_values"]
    instances = (explanation.instances or [[]])[0]
    blank = predict_by_hand(model, inputs, torch.full_like(pixels, float(pixels.mean())))
    assert [instance.without_image for instance in instances] == pytest.approx(blank, rel=1e-6)
    assert [instance.score for instance in instances] == pytest.approx(predict_by_hand(model, inputs, pixels), rel=1e-6)
    phrase = gradcam.explain(model, inputs, target=Token(WORDS, [(1, 2)], control="blank"))
    assert (phrase.instances or [[]])[0][0].without_image == pytest.approx(blank[1] * blank[2], rel=1e-6)
    plain = gradcam.explain(model, inputs, target=Token(WORDS))
    assert torch.equal(plain.maps, explanation.maps)
    assert [instance.without_image for instance in (plain.instances or [[]])[0]] == [None] * 4


@pytest.mark.parametrize(
    ("score", "without_image", "expected"), [(0.9, 0.8, True), (0.9, 0.3, False), (0.9, None, False)]
)
def test_words_that_follow_from_the_text(score: float, without_image: float | None, expected: bool) -> None:
    instance = gradcam.targets.Instance("word", "of", score=score, without_image=without_image)
    assert instance.is_from_text is expected


def test_the_blank_image_leaves_no_trace_in_a_training_model(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    target = Token(WORDS, control="blank")
    expected = gradcam.explain(model, inputs, target=target).instances or [[]]
    dropout = model.get_submodule("model.multi_modal_projector").register_forward_hook(
        lambda module, args, output: nn.functional.dropout(output, 0.5, module.training)
    )
    model.train()
    state = torch.get_rng_state()
    try:
        instances = gradcam.explain(model, inputs, target=target).instances or [[]]
        assert all(module.training for module in model.modules())
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        model.eval()
        dropout.remove()
    baselines = [word.without_image for word in expected[0]]
    assert [word.without_image for word in instances[0]] == pytest.approx(baselines, rel=1e-9)


def test_words_from_the_text_are_drawn_in_grey() -> None:
    image = np.random.default_rng(0).integers(0, 255, (28, 28, 3), dtype=np.uint8)
    classifier = gradcam.load_classifier(nn.Sequential(nn.Conv2d(3, 4, 3, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    explanation = classifier.explain(image, "0", target=lambda output: output[:, 1])
    drawn = []
    for without_image in (0.1, 0.9):
        instance = gradcam.targets.Instance("word", "of", score=0.9, without_image=without_image)
        drawn.append(replace(explanation, instances=[[instance]]).overlay().astype(int))
    assert np.ptp(drawn[0], axis=2).max() > 50
    assert np.ptp(drawn[1], axis=2).max() == 0


def test_context_is_the_closest_combination_of_earlier_maps() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    generator = torch.Generator().manual_seed(0)
    maps = torch.rand(2, 12, 5, 4, generator=generator, dtype=torch.float64).square()
    maps[1] += 5 * torch.rand(5, 4, generator=generator)  # maps that hardly differ
    maps[:, -1] = maps[:, :-1].mean(1)  # a word without evidence of its own
    results = subtract_context(maps).flatten(2).numpy()
    rows = maps.flatten(2).numpy()
    for n in range(2):
        assert np.array_equal(results[n, 0], rows[n, 0])
        for k in range(1, 12):
            weights, _ = optimize.nnls(rows[n, :k].T, rows[n, k])
            assert results[n, k] == pytest.approx(np.maximum(rows[n, k] - weights @ rows[n, :k], 0), abs=1e-6)
        assert results[n, -1].max() < 1e-6


def test_context_of_signed_maps() -> None:
    maps = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    signed = torch.cat([maps, -maps], 2)
    assert torch.allclose(subtract_context(signed), torch.cat([subtract_context(maps), -subtract_context(maps)], 2))


def test_context_in_an_explanation(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    plain = gradcam.explain(model, inputs, target=Token(WORDS))
    less = gradcam.explain(model, inputs, target=Token(WORDS, context="subtract"))
    assert torch.allclose(less.maps, subtract_context(plain.maps))
    assert less.heatmaps.amax() == 1
    with pytest.raises(TargetError, match="earlier words: leave position= and word= out"):
        Token(WORDS, 2, context="subtract")
    with pytest.raises(TargetError, match="earlier words"):  # Only the first word is contrasted.
        Token(WORDS, against=15, context="subtract")


def test_black_pixels_of_an_image_without_padding_become_grey() -> None:
    pixels = torch.rand(1, 3, 4, 4).masked_fill(torch.eye(4, dtype=torch.bool), 0)
    blank = blank_images(to_batch(pixels)).pictures
    assert torch.allclose(blank, pixels.mean().expand_as(pixels))


@pytest.mark.parametrize("option", [{"control": "black"}, {"context": "drop"}])
def test_unknown_controls(option: dict[str, Any]) -> None:
    with pytest.raises(TargetError, match="black|drop"):
        Token(WORDS, **option)


def test_sinks(recwarn: pytest.WarningsRecorder) -> None:
    maps = torch.rand(1, 6, 4, 4, generator=torch.Generator().manual_seed(0)) / 4
    maps[:, range(6), [0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 0, 1]] = 1
    warn_of_sinks(maps)
    warn_of_sinks(torch.ones(1, 3, 4, 4))  # too few words
    assert not recwarn.list
    maps[0, :, 3, 2] = 0.8
    with pytest.warns(GradcamWarning, match="row 3, column 2, the heatmaps of nearly all 6 words are high"):
        warn_of_sinks(maps)
