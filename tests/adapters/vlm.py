"""Build tiny vision-language models with random weights, and their real processors with a tiny tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers as T
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

IMAGE = "<image>"
ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
SPECIAL_TOKENS = [
    IMAGE, "<video>", "<fake_token_around_image>", "<global-img>", *ROWS, "\n", "<img>", "</img>", "<context>",
    "<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
    "<boi>", "<soft>", "<eoi>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL",
    "TILE", "<end_of_utterance>", "<grounding>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>",
    "<|tile_x_separator|>", "<|tile_y_separator|>",
]  # fmt: skip
NAMES = {
    "image_token": IMAGE, "video_token": "<video>", "start_image_token": "<img>", "end_image_token": "</img>",
    "context_image_token": "<context>", "boi_token": "<boi>", "eoi_token": "<eoi>",
}  # fmt: skip
VOCABULARY = ["<pad>", "<s>", "</s>", "<unk>", *"what is on the table _ 1 2 3 4 5 6 7 8 9 yes no cup".split()]  # noqa: SIM905
WORDS = len(VOCABULARY) + len(SPECIAL_TOKENS) + 1194  # PaliGemma's processor adds 1,152 tokens.

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
}
Size = tuple[int, int]
Numbers = NDArray[np.int64]
SQUARE, WIDE, TALL = (64, 64), (40, 112), (112, 40)


def make_tokenizer(**names: str | None) -> Any:
    """Return a tokenizer of whole words. `names` are names of special tokens, and None leaves a name out."""
    words = [*VOCABULARY, *SPECIAL_TOKENS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    special_tokens = {name: token for name, token in (NAMES | names).items() if token is not None}
    options = {"extra_special_tokens": special_tokens, "padding_side": "left"}
    fast = T.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends, **options)
    fast.add_tokens(SPECIAL_TOKENS, special_tokens=True)
    return fast


def find_token(token: str) -> int:
    return int(make_tokenizer().convert_tokens_to_ids(token))


def make_image_processor(name: str, backend: str, **options: Any) -> Any:
    """Return an image processor: of Transformers 5 (X and XPil) or 4 (XFast and X), for torchvision and PIL."""
    is_new = int(T.__version__.partition(".")[0]) >= 5
    suffix = {"pil": "Pil" if is_new else "", "torchvision": "" if is_new else "Fast"}[backend]
    only = f"{name}ImageProcessor" + ("" if is_new else "Fast")  # Some families have no processor for PIL.
    kind = getattr(T, f"{name}ImageProcessor{suffix}", None) or getattr(T, only)
    return kind(**options)


def text_config(kind: str = "llama", **options: Any) -> dict[str, Any]:
    ends = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return TINY | ends | {"model_type": kind, "num_key_value_heads": 2, "max_position_embeddings": 2048} | options


def vision_config(kind: str, size: int = 28, **options: Any) -> dict[str, Any]:
    return TINY | {"model_type": kind, "image_size": size, "patch_size": 7} | options


def make(name: str, token: str, key: str = "image_token_index", **options: Any) -> nn.Module:
    config = getattr(T, f"{name}Config")(**{key: find_token(token)}, **options)
    model: nn.Module = getattr(T, f"{name}ForConditionalGeneration")(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.is_meta and not parameter.any():  # Gemma 3's projection would be zero.
            nn.init.normal_(parameter, std=0.1)
    return model


def make_pixtral_vision() -> dict[str, Any]:
    return vision_config("pixtral", 56, head_dim=8)


def make_qwen(name: str, patch: int = 14, **vision: Any) -> nn.Module:
    rope = {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text = text_config("", hidden_size=64, num_hidden_layers=2, head_dim=16, rope_parameters=rope, rope_scaling=rope)
    del text["model_type"]
    sides = {"patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2}
    tokens = {"video": "<|video_pad|>", "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    ids = {f"{key}_token_id": find_token(token) for key, token in tokens.items()}
    vision_settings = {"depth": 3, "num_heads": 4} | sides | vision
    return make(name, "<|image_pad|>", "image_token_id", text_config=text, vision_config=vision_settings, **ids)


def make_llama4() -> nn.Module:
    # The model of Transformers 5.24 reads an attribute that its text model's output does not have.
    outputs: Any = T.modeling_outputs.MoeCausalLMOutputWithPast
    outputs.image_outputs = getattr(outputs, "image_outputs", None)
    sides = {"pixel_shuffle_ratio": 0.5, "intermediate_size": 128}
    sides |= {f"{name}_dim": 32 for name in ("vision_output", "projector_input", "projector_output")}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
    text = text_config("llama4_text", head_dim=8, attention_chunk_size=2048, **experts)
    vision = TINY | {"image_size": 28, "patch_size": 7} | sides
    return make("Llama4", "<|patch|>", "image_token_id", vision_config=vision, text_config=text)


def make_florence() -> nn.Module:
    vision = {
        "embed_dim": [16, 16, 32, 32], "num_heads": [2] * 4, "num_groups": [2] * 4, "depths": [1] * 4, "window_size": 2,
        "patch_size": [7, 3, 3, 3], "patch_stride": [4, 2, 2, 2], "patch_padding": [3, 1, 1, 1],
        "patch_prenorm": [False, True, True, True], "projection_dim": 32, "max_temporal_embeddings": 10,
        "max_position_embeddings": 20,
    }  # fmt: skip
    layers = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sides = {f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    text = (
        {"model_type": "bart", "vocab_size": WORDS, "d_model": 32, "max_position_embeddings": 200}
        | layers
        | sides
        | ends
    )
    return make("Florence2", IMAGE, "image_token_id", vision_config=vision, text_config=text)


def make_kosmos() -> nn.Module:
    text = {"vocab_size": WORDS, "embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 4, "pad_token_id": 0}
    text |= {"max_position_embeddings": 200, "bos_token_id": 1, "eos_token_id": 2}
    vision = TINY | {"image_size": 28, "patch_size": 7}
    config = T.Kosmos2Config(vision_config=vision, text_config=text, latent_query_num=6)
    # In Transformers 4, fused attention hides most patches from the latent queries.
    model: nn.Module = T.Kosmos2ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    return model


def make_blip() -> nn.Module:
    text = text_config(encoder_hidden_size=32, sep_token_id=2)
    config = T.BlipConfig(text_config=text, vision_config=TINY | {"image_size": 56, "patch_size": 7})
    model: nn.Module = T.BlipForConditionalGeneration(config).eval()
    return model


def make_git() -> nn.Module:
    vision = TINY | {"image_size": 56, "patch_size": 7}
    text = text_config()
    del text["model_type"]
    model: nn.Module = T.GitForCausalLM(T.GitConfig(vision_config=vision, **text)).eval()
    return model


def make_blip2(name: str = "Blip2") -> nn.Module:
    sides = {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = {"model_type": "opt", "vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | sides
    queries = TINY | {"encoder_hidden_size": 32, "cross_attention_frequency": 1, "vocab_size": WORDS}
    vision = TINY | {"image_size": 56, "patch_size": 7}
    options = {"vision_config": vision, "qformer_config": queries, "text_config": text, "num_query_tokens": 4}
    return make(name, IMAGE, **options)


def make_processor(name: str, image_processor: Any, **options: Any) -> Any:
    tokenizer = options.pop("tokenizer", None) or make_tokenizer()
    # Transformers 4 checks the classes of the tokenizer and of the image processor.
    unchecked = {"check_argument_for_proper_class": lambda self, name, argument: type(argument)}
    kind: Any = type(f"{name}Processor", (getattr(T, f"{name}Processor"),), unchecked)
    return kind(image_processor=image_processor, tokenizer=tokenizer, **options)


def clip_processor(backend: str, size: int = 28) -> Any:
    sides = {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
    return make_image_processor("CLIP", backend, **sides)


def square_processor(name: str, backend: str, size: int, **options: Any) -> Any:
    return make_image_processor(name, backend, size={"height": size, "width": size}, **options)


PINPOINTS = [[28, 56], [56, 28], [56, 56], [28, 84], [84, 28]]


def anyres_processor(name: str, backend: str, **options: Any) -> Any:
    key = "shortest_edge" if name == "LlavaNext" else None
    size = {key: 28} if key else {"height": 28, "width": 28}
    return make_image_processor(name, backend, size=size, image_grid_pinpoints=PINPOINTS, **options)


def idefics_processor(name: str, backend: str) -> Any:
    sides = {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}}
    return make_image_processor(name, backend, **sides)


def make_idefics_processor(name: str, backend: str) -> Any:
    options: dict[str, Any] = {}
    if name == "SmolVLM":
        from transformers.models.smolvlm import processing_smolvlm

        processing_smolvlm.num2words = str  # The processor checks for this package, which only videos need.
        options["video_processor"] = T.SmolVLMVideoProcessor()
    return make_processor(name, idefics_processor(name, backend), image_seq_len=4, **options)


def make_qwen_processor(name: str, backend: str, patch: int = 14) -> Any:
    sides = {"size": {"shortest_edge": 7056, "longest_edge": 40000}, "min_pixels": 7056, "max_pixels": 40000}
    images = make_image_processor("Qwen2VL", backend, patch_size=patch, merge_size=2, temporal_patch_size=2, **sides)
    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    video = getattr(T, "Qwen3VLVideoProcessor" if name == "Qwen3VL" else "Qwen2VLVideoProcessor")()
    return make_processor(name, images, tokenizer=make_tokenizer(**names), video_processor=video)


def make_pixtral_processor(backend: str, merge: int = 1) -> Any:
    sides = {"size": {"longest_edge": 56}, "patch_size": {"height": 7 * merge, "width": 7 * merge}}
    options = {"patch_size": 7, "spatial_merge_size": merge}
    return make_processor("Pixtral", make_image_processor("Pixtral", backend, **sides), **options)


def make_paligemma_processor(backend: str) -> Any:
    images = square_processor("Siglip", backend, 28)
    images.image_seq_length = 16
    return make_processor("PaliGemma", images)


def make_florence_processor(backend: str) -> Any:
    images = make_image_processor("CLIP", backend, size={"height": 128, "width": 128}, do_center_crop=False)
    images.image_seq_length = 17
    return make_processor("Florence2", images)


def make_blip2_processor(name: str, backend: str) -> Any:
    options = {"qformer_tokenizer": make_tokenizer()} if name == "InstructBlip" else {}
    options["tokenizer"] = make_tokenizer(image_token=None)
    return make_processor(name, square_processor("Blip", backend, 56), num_query_tokens=4, **options)


@dataclass(frozen=True)
class Family:
    """A family of vision-language models.

    `make_processor` takes the backend of the image processor. `image` is the text that stands for an image in a prompt.
    `layers` are layers of the image encoder that are tested, and `text_layers` layers of the text model whose cells are
    image tokens. If `is_nested`, the processor takes a list of images for each prompt. `is_cropped` says that the
    processor sees only the largest centred square. `max_images` is the number of images that a prompt may have.
    """

    make_model: Callable[[], nn.Module]
    make_processor: Callable[[str], Any]
    layers: Sequence[str]
    text_layers: Sequence[str] = ("model.language_model.layers.0", "model.language_model.layers.1")
    image: str = IMAGE
    is_nested: bool = False
    is_cropped: bool = False
    max_images: int = 2
    call: dict[str, Any] = field(default_factory=dict)


TOWER = "model.vision_tower"
CLIP_LAYERS = (f"{TOWER}.embeddings.patch_embedding", f"{TOWER}.encoder.layers.0")
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_LAYERS = ("model.visual.blocks.0", "model.visual.blocks.2", "model.visual.merger")

FAMILIES: dict[str, Family] = {
    "llava": Family(
        lambda: make("Llava", IMAGE, vision_config=vision_config("clip_vision_model"), text_config=text_config()),
        lambda backend: make_processor(
            "Llava", clip_processor(backend), patch_size=7, vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
        (*CLIP_LAYERS, "model.multi_modal_projector"), is_cropped=True,
    ),
    "pixtral": Family(
        lambda: make(
            "Llava", "[IMG]", vision_config=make_pixtral_vision(), text_config=text_config("mistral", head_dim=8),
            vision_feature_layer=-1, vision_feature_select_strategy="full",
        ),
        make_pixtral_processor,
        (f"{TOWER}.patch_conv", f"{TOWER}.transformer.layers.0", "model.multi_modal_projector"), image="[IMG]",
    ),
    "llava_next": Family(
        lambda: make(
            "LlavaNext", IMAGE, vision_config=vision_config("clip_vision_model"), text_config=text_config(),
            image_grid_pinpoints=PINPOINTS,
        ),
        lambda backend: make_processor(
            "LlavaNext", anyres_processor("LlavaNext", backend, crop_size={"height": 28, "width": 28}), patch_size=7,
            vision_feature_select_strategy="default", num_additional_image_tokens=1,
        ),
        (*CLIP_LAYERS, "model.multi_modal_projector"),
    ),
    "onevision": Family(
        lambda: make(
            "LlavaOnevision", IMAGE, vision_config=vision_config("siglip_vision_model"), text_config=text_config("qwen2"),
            image_grid_pinpoints=PINPOINTS, vision_feature_layer=-1, vision_aspect_ratio="anyres_max_2",
        ),
        lambda backend: make_processor(
            "LlavaOnevision", anyres_processor("LlavaOnevision", backend), num_image_tokens=16,
            vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_2",
            video_processor=T.LlavaOnevisionVideoProcessor(),
        ),
        (*CLIP_LAYERS, "model.multi_modal_projector"), is_nested=True,
    ),
    "qwen2_vl": Family(
        lambda: make_qwen("Qwen2VL", embed_dim=32, hidden_size=64),
        lambda backend: make_qwen_processor("Qwen2VL", backend), QWEN_LAYERS, image=QWEN_IMAGE,
    ),
    "qwen2_5_vl": Family(
        lambda: make_qwen(
            "Qwen2_5_VL", hidden_size=32, out_hidden_size=64, intermediate_size=48, window_size=56,
            fullatt_block_indexes=[1],
        ),
        lambda backend: make_qwen_processor("Qwen2_5_VL", backend), QWEN_LAYERS, image=QWEN_IMAGE,
    ),
    "qwen3_vl": Family(
        lambda: make_qwen(
            "Qwen3VL", 16, hidden_size=32, out_hidden_size=64, intermediate_size=48, num_position_embeddings=64,
            deepstack_visual_indexes=[0, 1],
        ),
        lambda backend: make_qwen_processor("Qwen3VL", backend, 16), QWEN_LAYERS, image=QWEN_IMAGE,
    ),
    "internvl": Family(
        lambda: make(
            "InternVL", "<context>", "image_token_id", text_config=text_config("qwen2"), downsample_ratio=0.5,
            vision_config=TINY | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [7, 7]},
        ),
        lambda backend: make_processor(
            "InternVL", square_processor("GotOcr2", backend, 28, crop_to_patches=True, max_patches=6),
            image_seq_length=4, video_processor=T.InternVLVideoProcessor(),
        ),
        (f"{TOWER}.embeddings.patch_embeddings", f"{TOWER}.encoder.layer.0", "model.multi_modal_projector"),
        image="<context>", call={"crop_to_patches": True, "max_patches": 6},
    ),
    "aya": Family(
        lambda: make(
            "AyaVision", "<|IMG_PATCH|>", vision_config=vision_config("siglip_vision_model"),
            text_config=text_config("cohere2"), downsample_factor=2, vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        lambda backend: make_processor(
            "AyaVision", square_processor("GotOcr2", backend, 28, crop_to_patches=True, max_patches=6), patch_size=7,
            img_size=28, downsample_factor=2,
        ),
        (*CLIP_LAYERS, "model.multi_modal_projector"), call={"crop_to_patches": True, "max_patches": 6},
    ),
    "smolvlm": Family(
        lambda: make(
            "SmolVLM", IMAGE, "image_token_id", vision_config=vision_config("smolvlm_vision"), text_config=text_config(),
            scale_factor=2, pad_token_id=0,
        ),
        lambda backend: make_idefics_processor("SmolVLM", backend),
        ("model.vision_model.embeddings.patch_embedding", "model.vision_model.encoder.layers.0", "model.connector"),
        ("model.text_model.layers.0", "model.text_model.layers.1"), is_nested=True,
    ),
    "idefics3": Family(
        lambda: make(
            "Idefics3", IMAGE, "image_token_id", vision_config=vision_config("idefics3_vision"), text_config=text_config(),
            scale_factor=2, pad_token_id=0,
        ),
        lambda backend: make_idefics_processor("Idefics3", backend),
        ("model.vision_model.embeddings.patch_embedding", "model.vision_model.encoder.layers.0", "model.connector"),
        ("model.text_model.layers.0", "model.text_model.layers.1"), is_nested=True,
    ),
    "llama4": Family(
        make_llama4,
        lambda backend: make_processor("Llama4", square_processor("Llama4", backend, 28, max_patches=6), patch_size=7),
        ("vision_model.patch_embedding", "vision_model.model.layers.0", "multi_modal_projector"),
        ("language_model.model.layers.0", "language_model.model.layers.1"), image="<|image|>",
    ),
    "paligemma": Family(
        lambda: make(
            "PaliGemma", IMAGE, vision_config=vision_config("siglip_vision_model"),
            text_config=text_config("gemma", head_dim=8), projection_dim=32,
        ),
        make_paligemma_processor, (*CLIP_LAYERS, "model.multi_modal_projector"), is_nested=True,
    ),
    "gemma3": Family(
        lambda: make(
            "Gemma3", "<soft>", vision_config=vision_config("siglip_vision_model", 56),
            text_config=text_config("gemma3_text", head_dim=8, sliding_window=512), mm_tokens_per_image=16,
        ),
        lambda backend: make_processor(
            "Gemma3", square_processor("Gemma3", backend, 56), tokenizer=make_tokenizer(image_token="<soft>"),
            image_seq_length=16,
        ),
        (*CLIP_LAYERS, "model.multi_modal_projector"), image="<boi>", is_nested=True,
    ),
    "florence2": Family(
        make_florence, make_florence_processor, (f"{TOWER}.convs.3", f"{TOWER}.blocks.3.0", "model.multi_modal_projector"),
        ("model.language_model.encoder.layers.0",), image="", max_images=1,
    ),
    "kosmos2": Family(
        make_kosmos, lambda backend: make_processor("Kosmos2", clip_processor(backend)),
        ("vision_model.model.embeddings.patch_embedding", "vision_model.model.encoder.layers.0"), (), image="",
        is_cropped=True, max_images=1, call={"num_image_tokens": 6},
    ),
    "mistral3": Family(
        lambda: make(
            "Mistral3", "[IMG]", vision_config=make_pixtral_vision(), text_config=text_config("mistral", head_dim=8),
            spatial_merge_size=2,
        ),
        lambda backend: make_pixtral_processor(backend, 2),
        (f"{TOWER}.patch_conv", f"{TOWER}.transformer.layers.0", "model.multi_modal_projector"), image="[IMG]",
    ),
    "blip": Family(
        make_blip, lambda backend: make_processor("Blip", square_processor("Blip", backend, 56)),
        ("vision_model.embeddings.patch_embedding", "vision_model.encoder.layers.0"), (), image="", max_images=1,
    ),
    "blip2": Family(
        make_blip2, lambda backend: make_blip2_processor("Blip2", backend),
        ("vision_model.embeddings.patch_embedding", "vision_model.encoder.layers.0"), (), image="", max_images=1,
    ),
    "instructblip": Family(
        lambda: make_blip2("InstructBlip"), lambda backend: make_blip2_processor("InstructBlip", backend),
        ("vision_model.embeddings.patch_embedding", "vision_model.encoder.layers.0"), (), image="", max_images=1,
    ),
    "git": Family(
        make_git, lambda backend: make_processor("Git", clip_processor(backend, 56)),
        ("git.image_encoder.vision_model.embeddings.patch_embedding", "git.image_encoder.vision_model.encoder.layers.0"),
        (), image="", is_cropped=True, max_images=1,
    ),
}  # fmt: skip


def make_image(size: Size, seed: int = 0) -> NDArray[np.uint8]:
    """Return a smooth image with random colours, like a photograph out of focus."""
    coarse = torch.rand(1, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(coarse, size, mode="bilinear", align_corners=True)
    return (60 + 120 * smooth[0]).permute(1, 2, 0).round().to(torch.uint8).numpy()


def process(
    family: Family, prompts: Sequence[Sequence[NDArray[np.uint8]]], backend: str = "torchvision"
) -> dict[str, Any]:
    """Return the output of the family's processor for prompts with these images."""
    processor = family.make_processor(backend)
    texts = [f"what {' '.join([family.image] * len(images))} is on the table" for images in prompts]
    images = [list(row) for row in prompts] if family.is_nested else [image for row in prompts for image in row]
    options = {"return_tensors": "pt", "padding": True} | family.call
    inputs = processor(images=images, text=texts, **options)
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
