"""Test language models with quantised weights, whose gradients reach the image through the activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.targets import Token

pytest.importorskip("transformers")

from tests.adapters.vlm import FAMILIES, SQUARE, make_image, process

WORDS = [5, 9]
PROJECTOR = "model.multi_modal_projector"


def to_bitsandbytes(linear: nn.Linear, bits: int) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    sides: Any = (linear.in_features, linear.out_features, linear.bias is not None)
    if bits == 4:
        layer = bitsandbytes.nn.Linear4bit(*sides, compute_dtype=torch.float32, quant_type="nf4")
    else:
        layer = bitsandbytes.nn.Linear8bitLt(*sides, has_fp16_weights=False)
    layer.load_state_dict(linear.state_dict())
    quantised: nn.Module = layer.to("cpu")  # This call quantises the weights.
    return quantised


def to_torchao(linear: nn.Linear, bits: int) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    if bits == 4:
        pytest.skip("torchao has no 4-bit weights on every CPU")
    model = nn.Sequential(linear)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model[0]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("quantise", [to_bitsandbytes, to_torchao])
def test_maps_equal_autograd_by_hand(quantise: Callable[[nn.Linear, int], nn.Module], bits: int) -> None:
    torch.manual_seed(0)
    model = FAMILIES["llava"].make_model()
    inputs = process(FAMILIES["llava"], [[make_image(SQUARE)]])
    options: Any = {"target": Token(WORDS), "method": "hirescam", "evidence": "signed"}
    plain = gradcam.explain(model, inputs, PROJECTOR, **options)
    blocks: Any = model.get_submodule("model.language_model.layers")
    for name, module in list(blocks.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(blocks.get_submodule(parent), child, quantise(module, bits))
    explanation = gradcam.explain(model, inputs, PROJECTOR, **options)
    scores, maps = run_by_hand(model, inputs)
    largest = float(maps.abs().max())
    assert largest > 0
    # The 8-bit layers of bitsandbytes also round the activations, so that rounding errors can change a whole step.
    tolerance = 0.05 if (quantise, bits) == (to_bitsandbytes, 8) else 1e-5
    torch.testing.assert_close(explanation.scores[0], scores, rtol=0, atol=tolerance * float(scores.abs().max()))
    torch.testing.assert_close(explanation.maps[0], maps.view(2, 4, 4), rtol=0, atol=tolerance * largest)
    assert not torch.allclose(plain.maps, explanation.maps, rtol=1e-3)  # The weights are quantised.
    default = gradcam.explain(model, inputs, target=Token(WORDS))
    assert default.method == "elementwise-gradcam"
    assert default.maps.flatten(2).any(2).all()


def run_by_hand(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the scores of the words, and gradient times activation of each score at all tokens of the projector."""
    tensors: list[Tensor] = []
    handle = model.get_submodule(PROJECTOR).register_forward_hook(lambda *call: tensors.append(call[2]))
    words = torch.tensor([WORDS])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    answered = inputs | {"input_ids": torch.cat([ids, words], 1), "attention_mask": torch.cat([mask, mask[:, :2]], 1)}
    logits = model(**answered).logits[0]
    handle.remove()
    scores = [logits[ids.shape[1] - 1 + k, word] for k, word in enumerate(WORDS)]
    gradients = [torch.autograd.grad(score, tensors[0], retain_graph=True)[0] for score in scores]
    maps = torch.stack([(gradient * tensors[0]).sum(-1).flatten() for gradient in gradients])
    return torch.stack(scores).detach(), maps.detach()
