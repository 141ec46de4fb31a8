"""A small Qwen2-VL that describes scenes of `captions.py`, and its processor, both with the classes of transformers."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from tests.drawn.captions import COLOUR_ORDER, SHAPES, CaptionScene

FOLDER = Path(__file__).parent / "weights" / "captioner"
PATCH, MERGE = 8, 2  # pixels per patch, and patches per cell of the language model, along each axis
MIN_PIXELS, MAX_PIXELS = 96 * 96, 128 * 128  # images are resized to an area in this range
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
    "<|unknown|>",
)  # fmt: skip
WORDS = (
    *SHAPES, *COLOUR_ORDER, *("left", "right", "above", "below", "of", "a", "the", "there", "is", "what", "describe"),
    *("image", "yes", "no", ".", "?", "user", "assistant"),
)  # fmt: skip
CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'text' %}{{ part.text }}\
{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_processor() -> Qwen2VLProcessor:
    """Return Qwen2-VL's processor, with a tokenizer of one token per word."""
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate((*SPECIAL, *WORDS))}, SPECIAL[-1]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##")  # joins words by spaces
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token="<|im_end|>",
        unk_token=SPECIAL[-1],
        additional_special_tokens=list(SPECIAL[1:-1]),
        padding_side="left",
        model_max_length=512,
    )
    grid = {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    }
    return Qwen2VLProcessor(
        Qwen2VLImageProcessor(**grid), fast, Qwen2VLVideoProcessor(**grid), chat_template=CHAT_TEMPLATE
    )


def make_model() -> Qwen2VLForConditionalGeneration:
    """Return the model with random weights: about 1.2 million parameters."""
    special = {name: SPECIAL.index(f"<|{name}|>") for name in ("vision_start", "vision_end", "image_pad", "video_pad")}
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(SPECIAL) + len(WORDS),
            "hidden_size": 128,
            "intermediate_size": 320,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            # Wavelengths of 6 to 55 cells: grids have at most 10 cells along an axis.
            "rope_parameters": {"rope_type": "default", "rope_theta": 10.0, "mrope_section": [4, 6, 6]},
            "initializer_range": 0.08,
            "bos_token_id": None,
            "eos_token_id": SPECIAL.index("<|im_end|>"),
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 4,
            "embed_dim": 96,
            "hidden_size": 128,
            "num_heads": 3,
            "mlp_ratio": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "initializer_range": 0.08,
        },
        image_token_id=special["image_pad"],
        video_token_id=special["video_pad"],
        vision_start_token_id=special["vision_start"],
        vision_end_token_id=special["vision_end"],
        tie_word_embeddings=False,
    )
    return Qwen2VLForConditionalGeneration(config)


def encode(
    processor: Any, scenes: Sequence[CaptionScene], *, answers: bool = False, resize: bool = True
) -> dict[str, torch.Tensor]:
    """Return the model's inputs for a batch of scenes. With `answers`, the text includes them and the token after."""
    texts = []
    for scene in scenes:
        content = [{"type": "image"}, {"type": "text", "text": scene.prompt}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        texts.append(f"{text}{scene.answer}<|im_end|>" if answers else text)
    images = [scene.image for scene in scenes]
    return processor(text=texts, images=images, padding=True, do_resize=resize, return_tensors="pt")


def save_folder(model: Any, processor: Any, folder: Path = FOLDER) -> None:
    """Save the model, in float16, and its processor, with settings that transformers 4.57 and 5 both read."""
    processor.save_pretrained(folder)
    for part in (processor.image_processor, processor.video_processor):
        part.save_pretrained(folder)  # version 5 reads processor_config.json instead
    model.half().save_pretrained(folder)
    model.float()
    with edit_json(folder / "tokenizer_config.json") as settings:
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        del settings["extra_special_tokens"], settings["backend"]  # tokenizer.json has these tokens, too
    with edit_json(folder / "config.json") as settings:
        text = settings["text_config"]
        rope = text.pop("rope_parameters")
        text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
        del settings["vision_config"]["rope_parameters"]  # the default


@contextlib.contextmanager
def edit_json(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the file's settings, and write them with all changes."""
    settings = json.loads(path.read_text())
    yield settings
    path.write_text(json.dumps(settings, indent=2) + "\n")


def load_folder(folder: Path = FOLDER) -> tuple[Any, Any]:
    """Return the trained model for inference, in float32, and its processor."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.eval().requires_grad_(False), AutoProcessor.from_pretrained(folder)


@torch.no_grad()
def predict_words(model: Any, processor: Any, scenes: Sequence[CaptionScene]) -> list[list[str]]:
    """Return the most probable word at each position of the scenes' answers, given the words before (teacher forcing)."""
    predicted = []
    for start in range(0, len(scenes), 20):
        batch = scenes[start : start + 20]
        best = model(**encode(processor, batch, answers=True)).logits.argmax(-1)
        for row, scene in zip(best, batch):
            tokens = row[-len(scene.words) - 2 : -2]  # the last two predict the end, and what follows it
            predicted.append(processor.tokenizer.convert_ids_to_tokens(tokens.tolist()))
    return predicted


def measure_accuracy(model: Any, processor: Any, scenes: Sequence[CaptionScene]) -> dict[str, float]:
    """Return the share of words that the model predicts, for each kind of word."""
    hits: dict[str, list[bool]] = {}
    for words, scene in zip(predict_words(model, processor, scenes), scenes):
        for text, word in zip(words, scene.words):
            hits.setdefault(word.kind, []).append(text == word.text)
    return {kind: sum(values) / len(values) for kind, values in sorted(hits.items())}
