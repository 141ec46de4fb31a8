"""Small tokenizers of the three usual kinds: byte-level BPE as in GPT-2 and Qwen, SentencePiece as in Llama, and BERT."""

from __future__ import annotations

import json
from typing import Any

TEXTS = [
    "a red ring left of a blue square.", "yes, no. Yes No", "USER: what is it? ASSISTANT: a dog and a cat",
    "the dog's left-hand cup costs 3.5", "一只狗在草地上。",
]  # fmt: skip
BYTES = [f"<0x{number:02X}>" for number in range(256)]


def make_tokenizer(kind: str) -> Any:
    """Return a tokenizer of transformers, trained on `TEXTS`: "byte-level", "llama", "mistral" or "bert"."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<unk>", "<image>"]
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    elif kind == "bert":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=special)
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        splits = [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Punctuation()]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
        trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=[*special, *BYTES], limit_alphabet=45)
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in BYTES]
    if kind == "llama":  # Llama 2 inserts the marker of a word before every text, also between special tokens.
        replacement = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        steps = [{"type": "Prepend", "prepend": "▁"}, replacement]
        content |= {"pre_tokenizer": None, "normalizer": {"type": "Sequence", "normalizers": steps}}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    plain = Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(tokenizer_object=plain, **names, additional_special_tokens=["<image>"])
