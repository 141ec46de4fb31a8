"""Load a model's own tokenizer, and tokenise sentences with any kind of tokenizer."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradcam.errors import GradcamError, TargetError, shorten

WORD_MARKERS = ("Ġ", "▁")  # How tokenizers write the space before a word: byte-level BPE, and SentencePiece.
# Scripts without spaces between words: Thai, Lao, Myanmar, Khmer, Japanese and Chinese.
UNSPACED_LETTER = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
MAX_WORDS_IN_MESSAGE = 4  # The error for a long sentence quotes the last words before the limit.
SAVE = "save the tokenizer in the model's folder with tokenizer.save_pretrained(folder), and load the model from that folder"


@functools.lru_cache(maxsize=4)
def load_tokenizer(folder: str, error: type[GradcamError] = TargetError, advice: str = SAVE) -> Any:
    """Load Hugging Face's tokenizer from a folder. Raise `error` with the advice if there is no tokenizer.

    `folder` is "" for a model that was not loaded from a folder.
    """
    from transformers import AutoTokenizer

    tokenizer, reason = None, "the model was not loaded from a folder"
    if folder:
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            reason = "its vocabulary is empty"
        except Exception as failure:  # OSError, ValueError, ImportError, KeyError, and tokenizer errors
            missing = "there is no such folder, and no model of that name in the library's cache"
            reason = " ".join(str(failure).split())[:120] if Path(folder).is_dir() else missing
    # If the vocabulary file is missing, the library may create a tokenizer that has only special tokens.
    if tokenizer is None or len(tokenizer) <= len(set(tokenizer.all_special_tokens)):
        location = f", {folder}" if folder else ""
        raise error(f"No tokenizer was found for the model{location} ({reason}): {advice}.")
    return tokenizer


def tokenize(tokenizer: Any, texts: Sequence[str], max_tokens: int | None, *, fill: bool) -> Any:
    """Tokenise sentences with Hugging Face's or open_clip's tokenizer, or with any function that takes a list.

    `max_tokens` is the maximum length in tokens. If `fill` is True, sentences are padded to `max_tokens`. Otherwise,
    sentences are padded to the longest sentence. If the tokenizer can count tokens, `TargetError` is raised
    for a sentence that is too long.
    """
    inner = getattr(tokenizer, "tokenizer", tokenizer)  # open_clip may wrap Hugging Face's tokenizer.
    if hasattr(inner, "model_max_length"):
        max_tokens = min([inner.model_max_length, *([] if max_tokens is None else [max_tokens])])
        for text in texts:
            if (count := len(inner(text)["input_ids"])) > max_tokens:
                fitting = inner(text, truncation=True, max_length=max_tokens)["input_ids"]
                raise _make_length_error(text, count, max_tokens, inner.decode(fitting, skip_special_tokens=True))
        if inner is tokenizer:
            padding, length = ("max_length", max_tokens) if fill else (inner.pad_token is not None, None)
            return dict(inner(list(texts), padding=padding, max_length=length, return_tensors="pt"))
    elif all(hasattr(tokenizer, name) for name in ("encode", "decode", "context_length")):
        for text in texts:
            ids, max_ids = tokenizer.encode(text), tokenizer.context_length - 2  # without the start and end tokens
            if len(ids) > max_ids:
                raise _make_length_error(text, len(ids) + 2, max_ids + 2, tokenizer.decode(ids[:max_ids]))
    return tokenizer(list(texts))


def _make_length_error(text: str, count: int, max_tokens: int, fitting: str) -> TargetError:
    words = fitting.split()
    end = ("... " if len(words) > MAX_WORDS_IN_MESSAGE else "") + " ".join(words[-MAX_WORDS_IN_MESSAGE:])
    problem = f"The sentence {shorten(text)} has {count} tokens, but the model takes at most {max_tokens}"
    return TargetError(f"{problem}. The model would ignore the words after {end!r}. Shorten the sentence.")


def encode_continuation(tokenizer: Any, text: str, gap: str | None) -> list[int]:
    """Return the tokens of a sentence without special tokens. Raise `TargetError` for text that has no tokens.

    `gap` is the white space between earlier text and the sentence; None if there is no earlier text.

    Some tokenizers mark the beginning of a text as the beginning of a word, others only a space. The sentence is
    therefore tokenised after another character, whose tokens are removed.
    """
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    pairs = ((encode(start), encode(f"{start}{gap}{text}")) for start in (() if gap is None else (":", "\n")))
    # A tokenizer may join the other character with the sentence.
    ids: list[int] = next((full[len(start) :] for start, full in pairs if full[: len(start)] == start), [])
    ids = ids or encode(text)
    if not ids or getattr(tokenizer, "unk_token_id", None) in ids:
        problem = f"The model's tokenizer has no tokens for {'a part of ' if ids else ''}{shorten(text)}"
        raise TargetError(f"{problem}: choose words of the model's vocabulary.")
    return ids
