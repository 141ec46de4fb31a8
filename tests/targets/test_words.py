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
from gradcam.targets.words import Token, split_words
from tests.small_tokenizers import make_tokenizer

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


def explain_by_hand(model: nn.Module, picture: Tensor, caption: list[int], positions: list[int], form: Any) -> Any:
    """Return the sum of a phrase's scores, and its map, by one run of the model for each token.

    `form` computes the score of a token from its logits (V,) and its position.
    """
    total, cells = 0.0, torch.zeros(16, dtype=torch.float64)
    for position in positions:
        activations = []
        handle = model.git.visual_projection.register_forward_hook(lambda *call, kept=activations: kept.append(call[2]))
        row = torch.tensor([[1, *caption[:position]]])
        score = form(model(pixel_values=picture[None], input_ids=row).logits[0, -1], position)
        handle.remove()
        (gradient,) = torch.autograd.grad(score, activations)
        cells += (gradient * activations[0].detach()).sum(2)[0, 1:]
        total += float(score.detach())
    return total, cells.view(4, 4)


def log_softmax(logits: Tensor, token: int) -> Tensor:
    return logits[token] - logits.exp().sum().log()


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "logit": ({}, lambda logits, position: logits[CAPTION[position]]),
    "logprob": ({"score": "logprob"}, lambda logits, position: log_softmax(logits, CAPTION[position])),
    "against": ({"against": 3}, lambda logits, position: logits[CAPTION[position]] - logits[3]),
    "difference of log-probabilities": (
        {"against": 3, "score": "logprob"},
        lambda logits, position: log_softmax(logits, CAPTION[position]) - log_softmax(logits, 3),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_phrases_against_autograd(model: nn.Module, pictures: Tensor, form: str) -> None:
    """Use two images. For the difference to an alternative, only the first token of a phrase counts."""
    options, compute = FORMS[form]
    explanation = gradcam.explain(
        model, pictures, target=Token(CAPTION, [(2, 0), 1, [1]], **options), evidence="signed"
    )
    assert explanation.classes is not None
    assert explanation.classes.tolist() == [[-1, 9, 9]] * 2
    for i, picture in enumerate(pictures):
        for k, phrase in enumerate(([0, 2], [1], [1])):
            positions = phrase[:1] if "against" in options else phrase
            score, expected = explain_by_hand(model, picture, CAPTION, positions, compute)
            assert explanation.scores[i, k].item() == pytest.approx(score, rel=1e-6)
            scale = float(expected.abs().max())
            np.testing.assert_allclose(explanation.maps[i, k].numpy(), expected.numpy(), rtol=0, atol=1e-6 * scale)
            assert explanation.instances is not None
            instance = explanation.instances[i][k]
            probabilities = [read_by_hand(model, picture, j).softmax(0)[CAPTION[j]].item() for j in phrase]
            assert instance.score == pytest.approx(math.prod(probabilities), rel=1e-9)
            assert instance.index == (None if k == 0 else 9)
            assert (instance.kind, instance.number) == ("word", phrase[0])
            assert instance.form == ("phrase" if k == 0 else "token")
            assert instance.name == ("token 5 token 7" if k == 0 else "token 9")
            assert tuple(instance.against) == (("token 3",) if "against" in options else ())


def test_an_alternative_explains_the_first_token_by_default(model: nn.Module, pictures: Tensor) -> None:
    explanation = gradcam.explain(model, pictures, target=Token(CAPTION, against=np.int64(3)))
    expected = gradcam.explain(model, pictures, target=Token(CAPTION, 0, against=3))
    torch.testing.assert_close(explanation.maps, expected.maps)
    assert explanation.maps.shape[1] == 1
    with pytest.raises(
        TargetError, match=r"alternative, 9, begin with the same token, 9\. Only first tokens are compared"
    ):
        gradcam.explain(model, pictures, target=Token(CAPTION, [0, 1], against=9))
    with pytest.raises(TargetError, match="There is no token 12: the vocabulary has 12 tokens, 0 to 11"):
        gradcam.explain(model, pictures, target=Token(CAPTION, against=12))


def test_words_of_a_changed_output_are_scored_again(model: nn.Module, pictures: Tensor) -> None:
    """Ablation-CAM scores a phrase once for each channel: the score at zero must be that of the phrase."""
    layer = "git.image_encoder:last_hidden_state"
    options = {"method": "ablationcam", "evidence": "signed"}
    phrase = gradcam.explain(model, pictures, layer, target=Token(CAPTION, [(0, 1)], against=3), **options)
    first = gradcam.explain(model, pictures, layer, target=Token(CAPTION, 0, against=3), **options)
    np.testing.assert_allclose(phrase.maps.numpy(), first.maps.numpy(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (["a", " red", " ring", "."], [[0], [1], [2]]),
        (["a", " r", "ed", " ring", "s", ",", " no"], [[0], [1, 2], [3, 4], [6]]),
        (["don", "'", "t", " go", "!", "!"], [[0, 1, 2], [3]]),
        ([" left", "-", "hand", " -", " side"], [[0, 1, 2], [4]]),
        ([' "', "dog", '"', " $", "3", ".", "5", "."], [[1], [4, 5, 6]]),
        (["a ", "dog", " ", "cat", "\n", "cup"], [[0], [1], [3], [5]]),
        (["...", "\n", " ?"], []),
        (["", "a", " dog", ""], [[1], [2, 3]]),
        (["一", "只狗", "。", "GP", "T", "和"], [[0], [1], [3, 4], [5]]),
        (["a", " 猫", "", "", "。", "", " no"], [[0], [1, 2, 3], [6]]),
        (["प", "\u0942", " यह"], [[0, 1], [2]]),
        (["ภาพ", "แมว"], [[0], [1]]),
        (["그림", "에", " 개"], [[0, 1], [2]]),
        (["1", "2", " ×", " 3"], [[0, 1], [3]]),
        ([], []),
    ],
)
def test_words_of_a_caption(parts: list[str], words: list[list[int]]) -> None:
    """Check words by hand. A word has letters or digits, and no punctuation around it."""
    assert split_words(parts) == words


SENTENCE = "a red ring left of a blue square."


@pytest.fixture(scope="module", params=["byte-level", "llama", "bert"])
def speaker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Any]:
    """Return a captioner that was loaded from a folder with a tokenizer, and the tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp(request.param), make_tokenizer(request.param)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    ends = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    vision = small | {"image_size": 32, "patch_size": 8}
    torch.manual_seed(2)
    config = T.GitConfig(vision_config=vision, **small, **ends, max_position_embeddings=64, initializer_range=0.5)
    T.GitForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = T.GitForCausalLM.from_pretrained(folder, local_files_only=True)
    return model.double().eval(), T.AutoTokenizer.from_pretrained(folder)


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_sentence_that_the_model_did_not_write(speaker: tuple[nn.Module, Any], pictures: Tensor) -> None:
    """Check that every word has a map, and that the words are those of the sentence."""
    model, tokenizer = speaker
    explanation = gradcam.explain(model, pictures, target=Token(say=SENTENCE, word=all, score="logprob"))
    ids = encode(tokenizer, SENTENCE)
    by_tokens = gradcam.explain(model, pictures, target=Token(ids, score="logprob"))
    assert explanation.instances is not None
    assert [item.name for item in explanation.instances[0]] == SENTENCE.strip(".").split()
    assert [item.number for item in explanation.instances[0]] == list(range(8))
    assert {item.form for item in explanation.instances[0]} == {"word"}
    assert "".join(item.text or "" for item in explanation.instances[0]) == tokenizer.decode(ids).rstrip(".")
    # The scores and gradients of a word are the sums over its tokens: together they are those of all tokens.
    signed = [
        gradcam.explain(model, pictures, target=Token(ids, range(len(ids) - 1), score="logprob"), evidence="signed")
    ]
    signed += [
        gradcam.explain(model, pictures, target=Token(say=SENTENCE, word="all", score="logprob"), evidence="signed")
    ]
    for result in (lambda item: item.scores, lambda item: item.maps.flatten(2).mT):
        tokens, words = (result(item).double().sum(-1) for item in signed)
        np.testing.assert_allclose(words.numpy(), tokens.numpy(), rtol=1e-4, atol=1e-6)
    assert by_tokens.maps.shape[1] == len(ids) >= explanation.maps.shape[1]


def test_one_word_of_several_tokens(speaker: tuple[nn.Module, Any], pictures: Tensor) -> None:
    model, tokenizer = speaker
    ids = encode(tokenizer, "a dog cup reds no")
    lengths = [len(ids[: len(encode(tokenizer, text))]) for text in ("a dog cup", "a dog cup reds")]
    phrase = gradcam.explain(model, pictures, target=Token(ids, [tuple(range(*lengths))]))
    word = gradcam.explain(model, pictures, target=Token(ids, word=3))
    torch.testing.assert_close(phrase.maps, word.maps)
    assert lengths[1] - lengths[0] > 1
    assert word.instances is not None
    assert phrase.instances is not None
    (instance,), (by_position,) = word.instances[0], phrase.instances[0]
    assert (instance.name, instance.text, instance.index, instance.number) == ("reds", " reds", None, 3)
    assert (by_position.name, by_position.form, by_position.number) == ("reds", "phrase", lengths[0])
    assert word.classes is not None
    assert word.classes.tolist() == [[-1]] * 2
    with pytest.raises(TargetError) as error:
        gradcam.explain(model, pictures, target=Token(ids, word=[0, 5]))
    expected = "There is no word 5. The caption has 5 word(s), counted from 0: ['a', 'dog', 'cup', 'reds', 'no']."
    assert str(error.value) == expected


def test_yes_or_no(speaker: tuple[nn.Module, Any], pictures: Tensor) -> None:
    """Check the difference of two logits after the start token, which has no text before it."""
    model, tokenizer = speaker
    explanation = gradcam.explain(model, pictures, target=Token(say=" yes ", against="no "))
    yes, no = (encode(tokenizer, text)[0] for text in ("yes", "no"))
    rows = torch.tensor([[0], [0]])
    logits = model(pixel_values=pictures, input_ids=rows).logits[:, -1].detach()
    np.testing.assert_allclose(explanation.scores[:, 0].numpy(), (logits[:, yes] - logits[:, no]).numpy(), rtol=1e-5)
    assert explanation.instances is not None
    assert tuple(explanation.instances[0][0].against) == ("no",)
    by_id = gradcam.explain(model, pictures, target=Token([yes], against=no))
    torch.testing.assert_close(by_id.maps, explanation.maps)
    assert by_id.instances is not None
    assert by_id.instances[0][0].against[0] in ("no", "n")
    with pytest.raises(TargetError, match="The word and its alternative, 'yes', begin with the same token"):
        gradcam.explain(model, pictures, target=Token(say="yes", against="yes"))


def test_a_sentence_after_the_prompt_of_a_processor(speaker: tuple[nn.Module, Any], pictures: Tensor) -> None:
    """Compare with the whole text, tokenised at once: the answer begins a word, but not after a line break."""
    model, tokenizer = speaker
    for prompt, gap in (("USER: what is it? ASSISTANT:", " "), ("ASSISTANT:\n", "")):
        start = encode(tokenizer, prompt)
        rest = encode(tokenizer, f"{prompt}{gap}a dog")[len(start) :]
        inputs = {"pixel_values": pictures, "input_ids": torch.tensor([start] * 2)}
        explanation = gradcam.explain(model, dict(inputs), target=Token(say="a dog", position=0))
        expected = gradcam.explain(model, dict(inputs), target=Token(rest, 0))
        torch.testing.assert_close(explanation.maps, expected.maps)
        assert explanation.classes is not None
        assert explanation.classes.tolist() == [[rest[0]]] * 2


def test_the_length_of_a_written_caption(model: nn.Module, pictures: Tensor) -> None:
    assert gradcam.explain(model, pictures[:1], target=Token(max_tokens=1)).maps.shape[1] == 1
    longer = gradcam.explain(model, pictures[:1], target=Token(max_tokens=3)).maps.shape[1]
    assert 1 < longer <= 3


def test_without_a_tokenizer(model: nn.Module, pictures: Tensor) -> None:
    for target in (Token(CAPTION, word=0), Token(say="a dog"), Token(CAPTION, against="no")):
        with pytest.raises(TargetError, match="No tokenizer was found for the model .*: save the tokenizer") as error:
            gradcam.explain(model, pictures, target=target)
        assert "\n" not in str(error.value)


def test_a_prompt_belongs_to_the_input(model: nn.Module, pictures: Tensor) -> None:
    with pytest.raises(
        TargetError, match="^The prompt is part of the model's input: pass the processor's output"
    ) as error:
        gradcam.explain(model, pictures, target=Token(prompt="What is it?"))
    assert "gradcam.load_model(model, processor=processor), and call its explain." in str(error.value)


def test_forms_of_a_caption(model: nn.Module, pictures: Tensor) -> None:
    expected = gradcam.explain(model, pictures, target=Token(CAPTION, 1))
    for caption in (torch.tensor(CAPTION), np.array(CAPTION), tuple(CAPTION), torch.tensor(CAPTION, dtype=torch.int32)):
        for position in (1, [1], range(1, 2), np.int64(1)):
            torch.testing.assert_close(
                gradcam.explain(model, pictures, target=Token(caption, position)).maps, expected.maps
            )


def test_the_caption_that_the_model_writes(model: nn.Module, pictures: Tensor) -> None:
    family = find_family(model, CaptionerAdapter)
    assert family is not None
    written = family.write(pictures[:1])
    explanation = gradcam.explain(model, pictures[:1], target=Token())
    expected = gradcam.explain(model, pictures[:1], target=Token(written))
    assert explanation.classes is not None
    assert explanation.classes.tolist() == [written]
    torch.testing.assert_close(explanation.maps, expected.maps)
    for place, word in enumerate(written):
        assert int(read_by_hand(model, pictures[0], place, written).argmax()) == word
    with pytest.raises(TargetError, match="one image, but the batch has 2"):
        gradcam.explain(model, pictures, target=Token())
    with pytest.raises(TargetError, match=f"no token at position 99: the positions are 0 to {len(written) - 1}"):
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
    assert explanation.layer == "model.git.visual_projection"
    torch.testing.assert_close(explanation.maps, gradcam.explain(model, pictures, target=Token(CAPTION)).maps)


@pytest.mark.parametrize(
    ("caption", "position", "message"),
    [
        ([], None, "The caption has no tokens"),
        (torch.tensor([], dtype=torch.int64), None, "The caption has no tokens"),
        (torch.tensor([CAPTION]), None, r"expected its tokens: integers in a list, or in a tensor \(T,\)"),
        ([5.0], None, "expected its tokens"),
        ("a dog", None, "The caption is 'a dog', expected its tokens"),
        (CAPTION, 3, "no token at position 3: the positions are 0 to 2"),
        (CAPTION, [0, 7], "no token at position 7"),
        (CAPTION, -1, "The position is -1, expected the number of a token"),
        (CAPTION, [], "expected the number of a token, several numbers, or None for all"),
        (CAPTION, True, "The position is True"),
        (CAPTION, 1.0, "The position is 1.0"),
        (None, "dog", "The position is 'dog'"),
        (None, False, "The position is False"),
        (CAPTION, [()], r"The position is \[\(\)\], expected .*\[\(3, 4\), 7\] is a phrase and a token"),
        (CAPTION, [(1, 1)], r"The position is \[\(1, 1\)\]"),
        (CAPTION, [(0, -1)], "The position is"),
        (CAPTION, [(0, (1,))], "The position is"),
        (CAPTION, [0, (1, 3)], "no token at position 3: the positions are 0 to 2"),
    ],
)
def test_bad_input(caption: Any, position: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message) as error:
        Token(caption, position)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": 1, "word": 1}, "position= and word= exclude each other: give only one of them"),
        ({"ids": CAPTION, "say": "a dog"}, "ids= and say= exclude each other: give only one of them"),
        ({"say": ""}, "say= is '', expected a sentence"),
        ({"say": " \n"}, "say= is .*, expected a sentence"),
        ({"say": ["a", "dog"]}, "say= is .*, expected a sentence"),
        ({"say": 3}, "say= is 3, expected a sentence"),
        ({"against": ""}, "against= is '', expected a word, or a token id from 0"),
        ({"against": -1}, "against= is -1"),
        ({"against": True}, "against= is True"),
        ({"against": ["no"]}, "against= is"),
        ({"prompt": " "}, "prompt= is ' ', expected a question"),
        ({"prompt": 5}, "prompt= is 5"),
        ({"score": "probability"}, "The score is 'probability', expected one of 'logit', 'logprob'"),
        ({"score": None}, "The score is None"),
        ({"max_tokens": 0}, "max_tokens is 0, expected a whole number, 1 or more"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0"),
        ({"word": -1}, "The word is -1, expected a number from 0, several numbers, or 'all'"),
        ({"word": []}, r"The word is \[\]"),
        ({"word": [(0, 1)]}, r"The word is \[\(0, 1\)\]"),
        ({"word": "dog"}, "The word is 'dog'"),
        ({"word": True}, "The word is True"),
        ({"word": 0, "ids": []}, "The caption has no tokens"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TargetError, match=message) as error:
        Token(**options)
    assert "\n" not in str(error.value)


def test_a_model_that_writes_no_text() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(5))
    with pytest.raises(TargetError, match="Sequential is not a supported captioning model"):
        gradcam.explain(model, torch.rand(1, 3, 8, 8), target=Token(CAPTION))
