"""Test the default layer and method for the words of vision-language models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gradcam
import gradcam.cam.pieces as pieces_module
from gradcam.targets import Token
from tests.cam.test_lens import WORDS, make_florence, make_llava

T: Any = pytest.importorskip("transformers")
PROJECTOR = "model.multi_modal_projector"


def differentiate(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the projector's output (N,T,C), and its gradient for each word's logit."""
    leaves: list[Tensor] = []

    def cut(module: object, arguments: object, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[0]

    handle = model.get_submodule(PROJECTOR).register_forward_hook(cut)
    prompt = inputs["input_ids"]
    ids = torch.cat([prompt, torch.tensor([WORDS])], 1)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=inputs["pixel_values"]).logits[0]
    handle.remove()
    scores = [logits[prompt.shape[1] - 1 + k, word] for k, word in enumerate(WORDS)]
    return leaves[0].detach(), [torch.autograd.grad(score, leaves[0], retain_graph=True)[0] for score in scores]


def test_the_default_is_elementwise_gradcam_at_the_projector() -> None:
    model, inputs = make_llava()
    explanation = gradcam.explain(model, inputs, target=Token(WORDS))
    assert (explanation.layer, explanation.method) == (PROJECTOR, "elementwise-gradcam")
    activations, gradients = differentiate(model, inputs)
    for k, gradient in enumerate(gradients):
        expected = (activations * gradient).relu().sum(2).unflatten(1, (4, 4))
        torch.testing.assert_close(explanation.maps[:, k], expected.float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_maps_do_not_depend_on_the_words_per_pass(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = make_llava()
    expected = gradcam.explain(model, inputs, target=Token(WORDS)).maps
    passes, differentiate_once = [], torch.autograd.grad
    monkeypatch.setattr(pieces_module, "SCORES_PER_PASS", count)
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *args, **kwargs: passes.append(1) or differentiate_once(*args, **kwargs)
    )
    torch.testing.assert_close(gradcam.explain(model, inputs, target=Token(WORDS)).maps, expected)
    assert len(passes) == -(-len(WORDS) // count)


def test_other_methods_keep_their_layer() -> None:
    model, inputs = make_llava()
    named = gradcam.explain(model, inputs, method="hirescam", target=Token(WORDS))
    signed = gradcam.explain(model, inputs, evidence="signed", target=Token(WORDS))
    assert named.layer == signed.layer != PROJECTOR
    assert (named.method, signed.method) == ("hirescam", "hirescam")
    elementwise = gradcam.explain(model, inputs, method="elementwise-gradcam", target=Token(WORDS))
    assert elementwise.layer == PROJECTOR


def test_encoders_keep_hirescam() -> None:
    model, inputs = make_florence()
    explanation = gradcam.explain(model, inputs, target=Token(WORDS))
    assert explanation.method == "hirescam"


def test_objects_of_drawn_scenes_are_found() -> None:
    from tests.drawn.captioner import encode, load_folder
    from tests.drawn.captions import draw_caption_scene

    model, processor = load_folder()
    rocs = []
    for number in range(8):
        scene = draw_caption_scene([49, number])
        inputs = dict(encode(processor, [scene], resize=False))
        tokens = processor.tokenizer(scene.answer)["input_ids"]
        heatmaps = gradcam.explain(model, inputs, target=Token(tokens)).heatmaps[0]
        for word, heatmap in zip(scene.words, heatmaps):
            if word.kind == "object":
                inside, outside = heatmap[word.mask].numpy(), heatmap[~word.mask].numpy()
                rocs.append(np.mean(np.searchsorted(np.sort(outside), inside, "left")) / len(outside))
    assert np.mean(rocs) > 0.9
