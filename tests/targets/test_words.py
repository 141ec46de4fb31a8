"""Test the words of a caption as targets: the selected words, the names of the maps, and the errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.adapters import find_family
from gradcam.adapters.base import CaptionerAdapter
from gradcam.errors import TargetError
from gradcam.targets.words import Token

T: Any = pytest.importorskip("transformers")
CAPTION = [5, 9, 7]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    vision = small | {"image_size": 32, "patch_size": 8}
    ends = {"vocab_size": 12, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    captioner: nn.Module = T.GitForCausalLM(
        T.GitConfig(vision_config=vision, **small, **ends, max_position_embeddings=16)
    )
    generator = torch.Generator().manual_seed(5)
    for name, parameter in captioner.named_parameters():
        if "norm" not in name.lower():
            deviation = 0.3 if parameter.ndim < 2 else 1.5 / math.sqrt(parameter[0].numel())
            parameter.data = torch.randn(parameter.shape, generator=generator) * deviation
    return captioner.double().eval()


@pytest.fixture
def pictures() -> Tensor:
    return torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def read_by_hand(model: nn.Module, picture: Tensor, place: int, caption: list[int] = CAPTION) -> Tensor:
    """Return the logits of a word from the words before it."""
    row = torch.tensor([[1, *caption[:place]]])
    return model(pixel_values=picture[None], input_ids=row).logits[0, -1].detach()


def test_what_each_map_is_of(model: nn.Module, pictures: Tensor) -> None:
    explanation = gradcam.explain(model, pictures, target=Token(CAPTION, [2, 0]))
    assert explanation.classes is not None
    assert explanation.classes.tolist() == [[7, 5]] * 2
    for i, instances in enumerate(explanation.instances or ()):
        for k, (place, instance) in enumerate(zip((2, 0), instances)):
            logits = read_by_hand(model, pictures[i], place)
            word = CAPTION[place]
            exponents = [math.exp(float(logit)) for logit in logits]
            assert (instance.kind, instance.name, instance.number) == ("word", f"token {word}", place)
            assert instance.index == word
            assert instance.score == pytest.approx(exponents[word] / sum(exponents), rel=1e-9)
            assert explanation.scores[i, k].item() == pytest.approx(float(logits[word]), rel=1e-6)


def test_forms_of_a_caption(model: nn.Module, pictures: Tensor) -> None:
    expected = gradcam.explain(model, pictures, target=Token(CAPTION, 1))
    for caption in (torch.tensor(CAPTION), np.array(CAPTION), tuple(CAPTION), torch.tensor(CAPTION, dtype=torch.int32)):
        for position in (1, [1], range(1, 2), np.int64(1)):
            assert torch.equal(gradcam.explain(model, pictures, target=Token(caption, position)).maps, expected.maps)


def test_the_caption_that_the_model_writes(model: nn.Module, pictures: Tensor) -> None:
    family = find_family(model, CaptionerAdapter)
    assert family is not None
    written = family.write(pictures[:1])
    explanation = gradcam.explain(model, pictures[:1], target=Token())
    expected = gradcam.explain(model, pictures[:1], target=Token(written))
    assert explanation.classes is not None
    assert explanation.classes.tolist() == [written]
    assert torch.equal(explanation.maps, expected.maps)
    for place, word in enumerate(written):
        assert int(read_by_hand(model, pictures[0], place, written).argmax()) == word
    with pytest.raises(TargetError, match="one image, but the batch has 2"):
        gradcam.explain(model, pictures, target=Token())
    with pytest.raises(TargetError, match=f"no token at position 99: the caption has {len(written)}"):
        gradcam.explain(model, pictures[:1], target=Token(position=99))


def test_several_views_and_other_methods(model: nn.Module, pictures: Tensor) -> None:
    """Check that words can be explained in flipped views, because a word has no position; a caption may have one word."""
    first_picture = pictures[:1]
    flipped = gradcam.explain(model, first_picture, target=Token([5]), augmentation="flip", evidence="signed")
    upright = gradcam.explain(model, first_picture, target=Token([5]), evidence="signed").maps
    mirrored = gradcam.explain(model, first_picture.flip(-1), target=Token([5]), evidence="signed").maps.flip(-1)
    expected = (upright + mirrored) / 2
    np.testing.assert_allclose(flipped.maps.numpy(), expected.numpy(), rtol=0, atol=1e-6 * float(expected.abs().max()))
    layer = flipped.layer
    for method in ("gradcam", "layercam", "ablationcam"):
        maps = gradcam.explain(model, pictures, layer, method=method, target=Token(CAPTION)).maps
        assert maps.flatten(1).any(1).all()
        alone = gradcam.explain(model, pictures[1:], layer, method=method, target=Token(CAPTION)).maps
        np.testing.assert_allclose(maps[1:].numpy(), alone.numpy(), rtol=0, atol=1e-5 * float(alone.max()))


def test_what_is_erased_counts(model: nn.Module, pictures: Tensor) -> None:
    """Compute ablation by hand: the drop in the word's logit when one channel of the layer is zero."""
    tower = model.git.image_encoder
    layer = "git.image_encoder:last_hidden_state"
    explanation = gradcam.explain(
        model, pictures[:1], layer, method="ablationcam", target=Token(CAPTION, 1), evidence="signed"
    )
    before = float(read_by_hand(model, pictures[0], 1)[CAPTION[1]])
    tokens = tower(pictures[:1]).last_hidden_state.detach()[0, 1:]
    expected = torch.zeros(16, dtype=torch.float64)
    for channel in range(tokens.shape[1]):

        def erase(module: nn.Module, args: Any, output: Any, channel: int = channel) -> Any:
            output.last_hidden_state[:, :, channel] = 0
            return output

        handle = tower.register_forward_hook(erase)
        after = float(read_by_hand(model, pictures[0], 1)[CAPTION[1]])
        handle.remove()
        expected += (before - after) / abs(before) * tokens[:, channel]
    actual = explanation.maps[0, 0].flatten().double()
    np.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_a_model_inside_another(model: nn.Module, pictures: Tensor) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Tensor) -> Tensor:
            return self.model(**inputs).logits.argmax(-1)

    explanation = gradcam.explain(Wrapper(), pictures, target=Token(CAPTION))
    assert explanation.layer == "model.git.image_encoder:last_hidden_state"
    assert torch.equal(explanation.maps, gradcam.explain(model, pictures, target=Token(CAPTION)).maps)


@pytest.mark.parametrize(
    ("caption", "position", "message"),
    [
        ([], None, "The caption has no tokens"),
        (torch.tensor([], dtype=torch.int64), None, "The caption has no tokens"),
        (torch.tensor([CAPTION]), None, r"expected its tokens: integers in a list, or in a tensor \(T,\)"),
        ([5.0], None, "expected its tokens"),
        ("a dog", None, "The caption is 'a dog', expected its tokens"),
        (CAPTION, 3, "no token at position 3: the caption has 3, 0 to 2"),
        (CAPTION, [0, 7], "no token at position 7"),
        (CAPTION, -1, "The position is -1, expected a token number from 0"),
        (CAPTION, [], "expected a token number from 0, several, or None for all"),
        (CAPTION, True, "The position is True"),
        (CAPTION, 1.0, "The position is 1.0"),
        (None, "dog", "The position is 'dog'"),
    ],
)
def test_bad_input(caption: Any, position: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message) as error:
        Token(caption, position)
    assert "\n" not in str(error.value)


def test_a_model_that_writes_no_text() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(5))
    with pytest.raises(TargetError, match="Sequential is not a supported captioning model"):
        gradcam.explain(model, torch.rand(1, 3, 8, 8), target=Token(CAPTION))
