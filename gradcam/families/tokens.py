"""Words as a model's own tokenizer has them, and the other way round."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradcam.errors import GradcamError, TargetError, shorten

WORDS_SHOWN = 4  # of a sentence, where it would be cut
SAVE = "save it in the model's folder with tokenizer.save_pretrained(folder), and load the model from that folder"


@functools.lru_cache(maxsize=4)
def load_tokenizer(folder: str, error: type[GradcamError] = TargetError, advice: str = SAVE) -> Any:
    """Hugging Face's tokenizer of a folder, "" for a model that is of none. Raises `error` where there is none, with the
    advice."""
    from transformers import AutoTokenizer

    found, reason = None, "the model was not loaded from a folder"
    if folder:
        try:
            found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            reason = "its vocabulary is empty"
        except Exception as failure:  # OSError, ValueError, ImportError, KeyError, and those of each tokenizer
            missing = "there is no such folder, and no model of that name in the library's cache"
            reason = " ".join(str(failure).split())[:120] if Path(folder).is_dir() else missing
    # Where a vocabulary is missing, the library may make a tokenizer that knows nothing.
    if found is None or len(found) <= len(set(found.all_special_tokens)):
        where = f", {folder}" if folder else ""
        raise error(f"No tokenizer was found for the model{where} ({reason}): {advice}.")
    return found


def tokenize(tokenizer: Any, texts: Sequence[str], most: int | None, *, fill: bool) -> Any:
    """What a tokenizer gives for sentences: Hugging Face's, open_clip's, or any function of a list. `most`: how many
    tokens the model takes. `fill`: up to that many, and not only to the longest sentence. Raises `TargetError` for a
    sentence that is too long, where the tokenizer tells."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)  # open_clip has one around Hugging Face's
    if hasattr(inner, "model_max_length"):
        most = min([inner.model_max_length, *([] if most is None else [most])])
        for text in texts:
            count = len(inner(text)["input_ids"])
            if count > most:
                fitting = inner(text, truncation=True, max_length=most)["input_ids"]
                raise _too_long(text, count, most, inner.decode(fitting, skip_special_tokens=True))
        if inner is tokenizer:
            padding = "max_length" if fill else inner.pad_token is not None
            return dict(inner(list(texts), padding=padding, max_length=most if fill else None, return_tensors="pt"))
    elif all(hasattr(tokenizer, name) for name in ("encode", "decode", "context_length")):
        for text in texts:
            ids, room = tokenizer.encode(text), tokenizer.context_length - 2  # without the first and the last token
            if len(ids) > room:
                raise _too_long(text, len(ids) + 2, room + 2, tokenizer.decode(ids[:room]))
    return tokenizer(list(texts))


def _too_long(text: str, count: int, most: int, fitting: str) -> TargetError:
    words = fitting.split()
    last = ("... " if len(words) > WORDS_SHOWN else "") + " ".join(words[-WORDS_SHOWN:])
    return TargetError(
        f"The sentence {shorten(text)} has {count} tokens, but the model takes {most}: it would be cut after {last!r}. "
        "Shorten it."
    )
