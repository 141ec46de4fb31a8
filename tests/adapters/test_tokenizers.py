"""Test sentences that continue a text: the tokens must be those of the whole text, tokenised at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradcam.adapters.captioning import GenerativeCaptioner
from gradcam.adapters.tokenizers import encode_continuation
from gradcam.errors import TargetError
from gradcam.hooks.containers import to_batch
from tests.small_tokenizers import make_tokenizer

pytest.importorskip("transformers")
KINDS = ("byte-level", "llama", "mistral", "bert")


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return make_tokenizer(request.param)


class Captioner(GenerativeCaptioner):
    """A captioner without a model: only its tokenizer is used."""

    tokenizer: Any = None

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(SimpleNamespace())  # type: ignore[arg-type]
        self.tokenizer = tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def say(tokenizer: Any, prompt: list[int], text: str) -> list[int]:
    batch = to_batch({"pixel_values": torch.rand(1, 3, 8, 8), "input_ids": torch.tensor([prompt])})
    return Captioner(tokenizer).encode_sentence(text, batch)


@pytest.mark.parametrize(
    ("prompt", "gap"),
    [
        ("USER: what is it? ASSISTANT:", " "),
        ("<image>USER: a dog ASSISTANT:\n", ""),
        ("what is it?", " "),
        ("a cat", " "),
    ],
)
@pytest.mark.parametrize("text", ["Yes", "a red ring", "a dog, and a cat.", "no"])
def test_a_sentence_after_a_prompt(tokenizer: Any, prompt: str, gap: str, text: str) -> None:
    """Compare with the tokens of the whole text. The prompt's tokens are at its beginning."""
    start, whole = encode(tokenizer, prompt), encode(tokenizer, f"{prompt}{gap}{text}")
    assert whole[: len(start)] == start
    assert say(tokenizer, start, text) == whole[len(start) :]


@pytest.mark.parametrize("prompt", ["<s>", "<s><image><image>", "USER: a cat</s>"])
def test_a_sentence_after_special_tokens_begins_a_text(tokenizer: Any, prompt: str) -> None:
    assert say(tokenizer, encode(tokenizer, prompt), "a red ring") == encode(tokenizer, "a red ring")


def test_no_space_is_inserted_before_a_language_without_spaces() -> None:
    tokenizer = make_tokenizer("byte-level")
    tokens = say(tokenizer, encode(tokenizer, "ASSISTANT:"), "一只狗。")
    assert tokenizer.decode(tokens) == "一只狗。"


def test_an_alternative_begins_a_word_if_the_token_does(tokenizer: Any) -> None:
    start, inside = len(encode(tokenizer, "it?")), encode(tokenizer, "it?cup")
    after_space = encode(tokenizer, "it? cup")
    for token in encode(tokenizer, "a dog and yes, no"):
        begins = tokenizer.convert_ids_to_tokens(token)[0] in "Ġ▁"
        expected = (after_space if begins else inside)[start]
        assert Captioner(tokenizer).encode_alternative("cup", token) == expected


def test_an_anchor_that_the_tokenizer_joins_with_the_sentence() -> None:
    """Use a tokenizer that joins all punctuation with the next letter: there is no stable beginning."""

    class Joining:
        unk_token_id = 0

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [1000 * len(text) + i for i in range(len(text))]

    assert encode_continuation(Joining(), "a dog", " ") == [5000, 5001, 5002, 5003, 5004]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("猫", "has no tokens for a part of '猫': choose words of the model's vocabulary"),
        ("a dog ☃", "has no tokens for a part of 'a dog ☃'"),
        ("\x00", r"has no tokens for '\\x00'"),
    ],
)
def test_words_that_the_tokenizer_does_not_know(text: str, message: str) -> None:
    for gap in (None, " ", ""):
        with pytest.raises(TargetError, match=message):
            encode_continuation(make_tokenizer("bert"), text, gap)


@pytest.mark.parametrize("text", [" the dog's 狗在草 3.5, a red ring.", "a dog", "狗", "a 猫 no", "yes, no"])
def test_the_parts_of_a_caption_are_the_caption(tokenizer: Any, text: str) -> None:
    tokens = encode(tokenizer, text)
    parts = Captioner(tokenizer).split_caption(tokens)
    assert "".join(parts) == tokenizer.decode(tokens)
    assert "�" not in "".join(parts)
    assert len(parts) == len(tokens)


def test_several_tokens_of_one_character() -> None:
    """Check that the first token adds the character, and that the others add nothing."""
    tokenizer = make_tokenizer("byte-level")
    tokens = encode(tokenizer, "a 猫")
    assert len(tokens) == 5
    assert Captioner(tokenizer).split_caption(tokens) == ["a", " ", "猫", "", ""]
