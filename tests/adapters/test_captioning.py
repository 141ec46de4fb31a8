"""Test captioners: words against autograd by hand through the full model, and against the model's own captions."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.adapters import find_family
from gradcam.adapters.base import CaptionerAdapter
from gradcam.errors import ImageError, TargetError
from gradcam.targets.words import Token

T: Any = pytest.importorskip("transformers")
# Tokens: the size of the vocabulary, the image token, and the start and end tokens.
WORDS, PICTURE, START, END = 30, 29, 1, 2
CAPTION = [5, 9, 9, 17]
TOLERANCE = 1e-6

TINY_CONFIG = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
VISION = TINY_CONFIG | {"image_size": 32, "patch_size": 8, "num_hidden_layers": 3}
ENDS = {"vocab_size": WORDS, "bos_token_id": START, "eos_token_id": END, "pad_token_id": 0}
LLAMA = TINY_CONFIG | ENDS | {"num_key_value_heads": 2, "max_position_embeddings": 64}
QUERIES = TINY_CONFIG | {"encoder_hidden_size": 16, "cross_attention_frequency": 1, "vocab_size": WORDS}
OPT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24, "word_embed_proj_dim": 16}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}


def pair(encoder: Any, decoder: Any) -> nn.Module:
    config = T.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = START, 0, END
    return T.VisionEncoderDecoderModel(config)


def make_gpt() -> Any:
    crossed = {"add_cross_attention": True, "is_decoder": True}
    return T.GPT2Config(n_positions=16, n_embd=16, n_layer=2, n_head=2, **ENDS, **crossed)


def make_bert() -> Any:
    return T.BertConfig(**TINY_CONFIG, **ENDS, max_position_embeddings=16, add_cross_attention=True, is_decoder=True)


def make_swin(kind: str) -> Any:
    return getattr(T, kind)(image_size=64, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4)


def make_mbart() -> Any:
    shape = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
    crossed = {"is_decoder": True, "add_cross_attention": True, "forced_eos_token_id": None}
    return T.MBartConfig(**shape, **ENDS, **crossed, max_position_embeddings=16)


def make_trocr() -> Any:
    shape = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
    return T.TrOCRConfig(**shape, **ENDS, is_decoder=True, add_cross_attention=True, max_position_embeddings=16)


def make_blip() -> nn.Module:
    text = TINY_CONFIG | ENDS | {"encoder_hidden_size": 16, "sep_token_id": END, "max_position_embeddings": 16}
    return T.BlipForConditionalGeneration(T.BlipConfig(text_config=text, vision_config=VISION))


def make_git() -> nn.Module:
    return T.GitForCausalLM(T.GitConfig(vision_config=VISION, **TINY_CONFIG, **ENDS, max_position_embeddings=32))


def make_llava(kind: str, vision: Any, text: Any = None, **more: Any) -> nn.Module:
    text = T.LlamaConfig(**LLAMA) if text is None else text
    place = {"image_token_id" if kind == "InternVL" else "image_token_index": PICTURE}
    config = getattr(T, f"{kind}Config")(vision_config=vision, text_config=text, **place, **more)
    return getattr(T, f"{kind}ForConditionalGeneration")(config)


def make_intern() -> nn.Module:
    vision = VISION | {"image_size": [32, 32], "patch_size": [8, 8], "use_mean_pooling": False}
    return make_llava("InternVL", T.InternVLVisionConfig(**vision), downsample_ratio=0.5)


def make_aya() -> nn.Module:
    more = {"downsample_factor": 2, "alignment_intermediate_size": 16}
    return make_llava("AyaVision", T.SiglipVisionConfig(**VISION), **more)


def make_gemma() -> nn.Module:
    text = T.Gemma3TextConfig(**LLAMA, head_dim=8)
    vision = T.SiglipVisionConfig(**VISION, vision_use_head=False)
    return make_llava("Gemma3", vision, text, mm_tokens_per_image=4, boi_token_index=27, eoi_token_index=28)


def make_blip2(kind: str = "Blip2", *, t5: bool = False) -> nn.Module:
    text = T.T5Config(**T5, **ENDS, decoder_start_token_id=0) if t5 else T.OPTConfig(**OPT, **ENDS)
    parts = {"vision_config": VISION, "qformer_config": QUERIES, "text_config": text.to_dict()}
    config = getattr(T, f"{kind}Config")(**parts, num_query_tokens=4, image_token_index=PICTURE)
    return getattr(T, f"{kind}ForConditionalGeneration")(config)


@dataclass(frozen=True)
class Kind:
    """A family of captioners.

    `layer` is the default layer, and `module` the module whose first run computes it. `begin` are the tokens before the
    first word, which the argument `row` takes; `extra_inputs` are the inputs besides the images. `prefix` is the number
    of tokens before those of patches. With weights of `seed`, the model writes a few words.
    """

    make: Callable[[], nn.Module]
    layer: str
    begin: list[int]
    row: str = "input_ids"
    extra_inputs: dict[str, list[int]] = field(default_factory=dict)
    prefix: int = 1
    size: int = 32
    seed: int = 7

    @property
    def module(self) -> str:
        return self.layer.partition(":")[0]


def prompt(places: int, *words: int) -> list[int]:
    return [START, *[PICTURE] * places, *words]


def prompt_inputs(places: int) -> dict[str, list[int]]:
    row = prompt(places, 4, 6)
    return {"input_ids": row, "attention_mask": [1] * len(row)}


ENCODER = {"row": "decoder_input_ids"}
LAST_HIDDEN, TOWER, PROJECTOR = "last_hidden_state", "model.vision_tower", "model.multi_modal_projector"
FOUR = prompt(4, 4, 6)  # a prompt with four image tokens
KINDS: dict[str, Kind] = {
    "vit-gpt2": Kind(lambda: pair(T.ViTConfig(**VISION), make_gpt()), f"encoder:{LAST_HIDDEN}", [START], **ENCODER),
    "vit-bert": Kind(lambda: pair(T.ViTConfig(**VISION), make_bert()), f"encoder:{LAST_HIDDEN}", [START], **ENCODER, seed=8),
    "swin-gpt2": Kind(
        lambda: pair(make_swin("SwinConfig"), make_gpt()), f"encoder:{LAST_HIDDEN}", [START], **ENCODER, prefix=0, size=64
    ),
    "donut": Kind(
        lambda: pair(make_swin("DonutSwinConfig"), make_mbart()), f"encoder:{LAST_HIDDEN}", [START, 8], **ENCODER,
        extra_inputs={"decoder_input_ids": [START, 8]}, prefix=0, size=64, seed=10,
    ),
    "trocr": Kind(
        lambda: pair(T.DeiTConfig(**VISION), make_trocr()), f"encoder:{LAST_HIDDEN}", [START], **ENCODER, prefix=2
    ),
    "blip": Kind(make_blip, f"vision_model:{LAST_HIDDEN}", [START]),
    "blip-prompt": Kind(
        make_blip, f"vision_model:{LAST_HIDDEN}", [START, 7, 8],
        extra_inputs={"input_ids": [3, 7, 8, END], "attention_mask": [1] * 4},
    ),
    "git": Kind(make_git, "git.visual_projection", [START]),
    "git-prompt": Kind(make_git, "git.visual_projection", [START, 7], extra_inputs={"input_ids": [START, 7]}),
    "blip2": Kind(make_blip2, f"vision_model:{LAST_HIDDEN}", [PICTURE] * 4 + [START]),
    "blip2-prompt": Kind(
        make_blip2, f"vision_model:{LAST_HIDDEN}", [PICTURE] * 4 + [START, 6],
        extra_inputs={"input_ids": [PICTURE] * 4 + [START, 6]},
    ),
    "blip2-t5": Kind(lambda: make_blip2(t5=True), f"vision_model:{LAST_HIDDEN}", [0], **ENCODER, seed=13),
    "instructblip": Kind(
        lambda: make_blip2("InstructBlip"), f"vision_model:{LAST_HIDDEN}", FOUR,
        extra_inputs={**prompt_inputs(4), "qformer_input_ids": [3, 7]},
    ),
    "llava": Kind(
        lambda: make_llava("Llava", T.CLIPVisionConfig(**VISION), image_seq_length=16), f"{TOWER}.encoder.layers.1",
        prompt(16, 4, 6), extra_inputs=prompt_inputs(16),
    ),
    "llava-last": Kind(
        lambda: make_llava("Llava", T.CLIPVisionConfig(**VISION), image_seq_length=16, vision_feature_layer=-1),
        f"{PROJECTOR}.linear_1", prompt(16, 4, 6), extra_inputs=prompt_inputs(16), prefix=0,
    ),
    "llava-first": Kind(
        lambda: make_llava("Llava", T.CLIPVisionConfig(**VISION), image_seq_length=16, vision_feature_layer=[1, -3]),
        f"{TOWER}.encoder.layers.0", prompt(16, 4, 6), extra_inputs=prompt_inputs(16),
    ),
    "vipllava": Kind(
        lambda: make_llava("VipLlava", T.CLIPVisionConfig(**VISION), vision_feature_layers=[-1, -2], image_seq_length=16),
        f"{PROJECTOR}.projector_layernorm", prompt(16, 4, 6), extra_inputs=prompt_inputs(16), prefix=0,
    ),
    "aya": Kind(make_aya, f"{PROJECTOR}.layernorm", FOUR, extra_inputs=prompt_inputs(4), prefix=0),
    "internvl": Kind(make_intern, f"{PROJECTOR}.layer_norm", FOUR, extra_inputs=prompt_inputs(4), prefix=0),
    "gemma3": Kind(
        make_gemma, f"{PROJECTOR}.mm_soft_emb_norm", FOUR,
        extra_inputs={**prompt_inputs(4), "token_type_ids": [0, 1, 1, 1, 1, 0, 0]}, prefix=0, seed=18,
    ),
}  # fmt: skip
EVERY = pytest.mark.parametrize("kind", KINDS)


def make(kind: str) -> nn.Module:
    """Return the model in float64, with weights whose output depends on the image and on the words."""
    torch.manual_seed(0)
    model = KINDS[kind].make().double().eval()
    generator = torch.Generator().manual_seed(KINDS[kind].seed)
    for name, parameter in model.named_parameters():
        deviation = 0.1 if parameter.ndim < 2 else 1.0 / math.sqrt(parameter[0].numel())
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * deviation
        parameter.data = 1 + noise if "norm" in name and name.endswith("weight") else noise
    return model


def make_pictures(kind: str, images: int = 2) -> Tensor:
    side = KINDS[kind].size
    return torch.rand(images, 3, side, side, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def make_inputs(kind: str, pictures: Tensor) -> Any:
    extra_inputs = {name: torch.tensor([row] * len(pictures)) for name, row in KINDS[kind].extra_inputs.items()}
    return {"pixel_values": pictures, **extra_inputs} if extra_inputs else pictures


def run_by_hand(kind: str, model: nn.Module, pictures: Tensor, words: list[int]) -> tuple[Tensor, Tensor]:
    """Return the logits after the beginning and after each word, and the output of the layer."""
    spec, activations = KINDS[kind], []
    row = torch.tensor([[*spec.begin, *words]] * len(pictures))
    extra_inputs = {name: torch.tensor([item] * len(pictures)) for name, item in spec.extra_inputs.items()}
    extra_inputs.pop("attention_mask", None)  # nothing is masked
    if "token_type_ids" in extra_inputs:
        types = spec.extra_inputs["token_type_ids"] + [0] * len(words)
        extra_inputs["token_type_ids"] = torch.tensor([types] * len(pictures))
    if kind == "blip2-t5":
        extra_inputs["input_ids"] = torch.tensor([[PICTURE] * 4 + [START]] * len(pictures))

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        activations.append(output if isinstance(output, Tensor) else output[0])

    handle = model.get_submodule(spec.module).register_forward_hook(keep)
    output = model(**{**extra_inputs, "pixel_values": pictures, spec.row: row})
    handle.remove()
    return output.logits[:, -1 - len(words) :], activations[0]


def explain_by_hand(kind: str, model: nn.Module, pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Compute scores (N,K) and maps (N,K,h,w) word by word and cell by cell, with one image at a time."""
    scores, maps = [], []
    for picture in pictures:
        logits, tokens = run_by_hand(kind, model, picture[None], CAPTION[:-1])
        scores.append([])
        for place, word in enumerate(CAPTION):
            score = logits[0, place, word]
            (gradient,) = torch.autograd.grad(score, tokens, retain_graph=True)
            pairs = zip(gradient[0].detach().flatten(0, -2), tokens[0].detach().flatten(0, -2))
            cells = [float(g @ a) for g, a in pairs][KINDS[kind].prefix :]
            side = math.isqrt(len(cells))
            assert side * side == len(cells) > 1
            scores[-1].append(float(score.detach()))
            maps.append([cells[y * side : (y + 1) * side] for y in range(side)])
    actual = torch.tensor(maps, dtype=torch.float64)
    return torch.tensor(scores, dtype=torch.float64), actual.unflatten(0, (len(pictures), len(CAPTION)))


@EVERY
def test_all_words_of_a_caption(kind: str) -> None:
    """Use two images in one batch."""
    model, pictures = make(kind), make_pictures(kind)
    explanation = gradcam.explain(model, make_inputs(kind, pictures), target=Token(CAPTION), evidence="signed")
    scores, maps = explain_by_hand(kind, model, pictures)
    assert (explanation.layer, explanation.method) == (KINDS[kind].layer, "hirescam")
    np.testing.assert_allclose(explanation.scores.numpy(), scores.numpy(), rtol=TOLERANCE)
    assert (maps.abs().flatten(2).amax(2) > 0).all()
    for word_map, expected in zip(explanation.maps.flatten(0, 1), maps.flatten(0, 1)):
        np.testing.assert_allclose(word_map.numpy(), expected.numpy(), rtol=0, atol=TOLERANCE * expected.abs().max())


@EVERY
def test_the_default_layer_does_not_cancel_its_maps(kind: str) -> None:
    """Without biases, gradient times activation would be rounding noise before a norm, because a norm has no scale."""
    model, pictures = make(kind), make_pictures(kind, 1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    logits, tokens = run_by_hand(kind, model, pictures, CAPTION[:-1])
    for place, word in enumerate(CAPTION):
        (gradient,) = torch.autograd.grad(logits[0, place, word], tokens, retain_graph=True)
        products = (gradient * tokens).detach()[0].flatten(0, -2)[KINDS[kind].prefix :]
        assert (products.sum(1).abs() > 1e-3 * products.abs().sum(1)).float().mean() > 0.9
    explanation = gradcam.explain(model, make_inputs(kind, pictures), target=Token(CAPTION), evidence="signed")
    assert explanation.layer == KINDS[kind].layer


@EVERY
def test_some_words_alone(kind: str) -> None:
    """Check that later words do not affect the explanation of a word."""
    model, pictures = make(kind), make_pictures(kind, 1)
    inputs = make_inputs(kind, pictures)
    explanation = gradcam.explain(model, inputs, target=Token(torch.tensor(CAPTION), [2, 0]))
    full = gradcam.explain(model, inputs, target=Token(CAPTION))
    cut = gradcam.explain(model, inputs, target=Token([*CAPTION[:3], 20], (2, 0)))
    np.testing.assert_allclose(explanation.maps[0].numpy(), full.maps[0, [2, 0]].numpy(), rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(cut.scores.numpy(), explanation.scores.numpy(), rtol=TOLERANCE)
    np.testing.assert_allclose(cut.maps.numpy(), explanation.maps.numpy(), rtol=1e-5, atol=1e-12)


@EVERY
def test_what_a_model_writes(kind: str) -> None:
    """Compare with greedy search by hand, up to the end of the text; the model must not change."""
    model, pictures = make(kind).train(), make_pictures(kind, 1)
    family = find_family(model, CaptionerAdapter)
    assert family is not None
    before, settings = copy.deepcopy(model.state_dict()), model.generation_config.to_dict()
    state = torch.get_rng_state()
    written = family.write(make_inputs(kind, pictures), 6)
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert model.generation_config.to_dict() == settings
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()
    words: list[int] = []
    while len(words) < 6:
        logits, _ = run_by_hand(kind, model, pictures, words)
        word = int(logits[0, -1].argmax())
        if word == END:
            break
        words.append(word)
    assert written == words
    assert len(written) > 1


@EVERY
def test_a_painted_square(kind: str) -> None:
    """Check that all evidence lies on the coloured square: patches do not mix, and black contributes nothing."""
    model, pictures = make(kind), torch.zeros_like(make_pictures(kind, 1))
    modules = [KINDS[kind].module.partition(".encoder.layers")[0]]
    if modules[0].startswith(PROJECTOR):
        modules += [TOWER]
    if modules == ["git.visual_projection"]:
        modules += ["git.image_encoder"]
    for name, parameter in (pair for module in modules for pair in model.get_submodule(module).named_parameters()):
        if any(item in name.lower() for item in ("bias", "position", "class", "cls", "attn", "attention")):
            parameter.data.zero_()
    generator = torch.Generator().manual_seed(4)
    pictures[..., 8:16, 16:32] = torch.rand(3, 8, 16, generator=generator, dtype=torch.float64)
    explanation = gradcam.explain(model, make_inputs(kind, pictures), target=Token(CAPTION, 1), evidence="signed")
    cells = explanation.maps.shape[-1]
    side = KINDS[kind].size // cells
    inside = torch.zeros(cells, cells, dtype=torch.bool)
    inside[8 // side : -(-16 // side), 16 // side : 32 // side] = True
    assert (explanation.maps[0, 0][inside] != 0).all()
    assert (explanation.maps[0, 0][~inside] == 0).all()
    rows = range(8 // side * side, max(16, side))
    assert explanation.heatmaps[0, 0].abs().flatten().argmax() // KINDS[kind].size in rows


@pytest.mark.parametrize(
    "target",
    [Token(CAPTION), Token(CAPTION, [(0, 1), 3, (1, 2, 3)], score="logprob"), Token(CAPTION, [2, (0, 1)], against=4)],
    ids=["tokens", "phrases", "alternative"],
)
def test_one_pass_forward_and_one_back(target: Token, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that one forward and one backward pass are enough, and that attention stays fused."""
    model, runs, passes, fused = make("vit-gpt2"), [], [], []
    model.encoder.register_forward_hook(lambda *_: runs.append(1))
    grad, attend = torch.autograd.grad, nn.functional.scaled_dot_product_attention

    def count(*args: Any, **kwargs: Any) -> Any:
        passes.append(kwargs.get("is_grads_batched"))
        return grad(*args, **kwargs)

    def watch(*args: Any, **kwargs: Any) -> Tensor:
        fused.append(1)
        return attend(*args, **kwargs)

    pictures = make_pictures("vit-gpt2", 1)
    # The position of the layer's cells on the image is measured once.
    gradcam.explain(model, pictures, target=target)
    runs.clear()
    monkeypatch.setattr(torch.autograd, "grad", count)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watch)
    gradcam.explain(model, pictures, target=target)
    assert (len(runs), passes) == (1, [True])
    assert len(fused) == 3 + 2 * 2  # the encoder's three blocks, and two attentions in each block of the decoder


def test_logits_are_those_of_words_alone() -> None:
    """Check that a long prompt adds neither logits nor a key-value cache: only the logits of the explained words exist."""
    explanation = gradcam.explain(make("llava"), make_inputs("llava", make_pictures("llava")), target=Token(CAPTION))
    assert explanation.output.logits.shape == (2, len(CAPTION) + 1, WORDS)
    assert set(explanation.output) == {"logits", "image_outputs"}


def test_prompts_of_different_lengths() -> None:
    """Check that a prompt padded on the left has the same map as alone, and that padding on the right is refused."""
    model, pictures = make("llava"), make_pictures("llava")
    rows = torch.tensor([[0, *prompt(16, 4)], prompt(16, 4, 6)])
    mask = torch.tensor([[0] + [1] * 18, [1] * 19])
    inputs = {"pixel_values": pictures, "input_ids": rows, "attention_mask": mask}
    explanation = gradcam.explain(model, inputs, target=Token(CAPTION, 1))
    for i, begin in enumerate((prompt(16, 4), prompt(16, 4, 6))):
        alone = {"pixel_values": pictures[i : i + 1], "input_ids": torch.tensor([begin])}
        expected = gradcam.explain(model, alone, target=Token(CAPTION, 1))
        np.testing.assert_allclose(explanation.scores[i].numpy(), expected.scores[0].numpy(), rtol=1e-5)
        np.testing.assert_allclose(explanation.maps[i].numpy(), expected.maps[0].numpy(), rtol=1e-4, atol=1e-9)
    inputs["attention_mask"] = mask.flip(1)
    with pytest.raises(TargetError, match="pad prompts on the left"):
        gradcam.explain(model, inputs, target=Token(CAPTION, 1))


def test_one_prompt_for_all_pictures() -> None:
    model, pictures = make("git"), make_pictures("git")
    inputs = {"pixel_values": pictures, "input_ids": torch.tensor([[START, 7]])}
    explanation = gradcam.explain(model, inputs, target=Token([5]))
    expected = gradcam.explain(model, make_inputs("git-prompt", pictures), target=Token([5]))
    assert torch.equal(explanation.maps, expected.maps)


def test_words_are_called_as_people_read_them(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "a": 5, "dog": 9, "runs": 17}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    T.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]").save_pretrained(tmp_path)
    make("vit-gpt2").save_pretrained(tmp_path)
    model = T.VisionEncoderDecoderModel.from_pretrained(tmp_path, local_files_only=True)
    pictures = make_pictures("vit-gpt2").to(model.dtype)
    explanation = gradcam.explain(model, pictures, target=Token(CAPTION, [0, 1, 3]))
    names = [[item.name for item in instances] for instances in explanation.instances or ()]
    assert names == [["a", "dog", "runs"]] * 2
    assert find_family(model, CaptionerAdapter).decode_tokens([17, 5]) == ["runs", "a"]


def test_without_a_tokenizer(tmp_path: Path) -> None:
    model = make("git")
    with pytest.raises(TargetError, match="No tokenizer was found for the model"):
        find_family(model, CaptionerAdapter).decode_tokens(CAPTION)
    model.save_pretrained(tmp_path)
    model = T.GitForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    with pytest.raises(TargetError, match="tokenizer.save_pretrained"):
        find_family(model, CaptionerAdapter).decode_tokens(CAPTION)


@pytest.mark.parametrize(
    ("kind", "inputs", "caption", "message"),
    [
        ("llava", lambda x: x, CAPTION, "needs a prompt with a placeholder for the image"),
        (
            "git",
            lambda x: x,
            [5, WORDS],
            f"Token {WORDS} is not in the vocabulary of this GitForCausalLM: the vocabulary has {WORDS}",
        ),
        ("vit-gpt2", lambda x: x, [-1], "Token -1 is not in the vocabulary"),
        (
            "vit-gpt2",
            lambda x: x,
            [5] * 16,
            r"has 1 token\(s\) and the caption 16, but VisionEncoderDecoderModel takes 16",
        ),
        (
            "git",
            lambda x: {"pixel_values": x, "input_ids": torch.tensor([[1]] * 3)},
            CAPTION,
            "There are 3 texts in input_ids for 2 images: pass one text per image, or one for all images",
        ),
        (
            "git",
            lambda x: (x, torch.tensor([[1]] * 2)),
            CAPTION,
            r"^2 argument\(s\) were passed to GitForCausalLM without a name: .* by name, such as pixel_values and input_ids",
        ),
    ],
)
def test_bad_input(kind: str, inputs: Any, caption: list[int], message: str) -> None:
    with pytest.raises(TargetError, match=message) as error:
        gradcam.explain(make(kind), inputs(make_pictures(kind)), target=Token(caption))
    assert "\n" not in str(error.value)


def test_a_caption_of_no_words() -> None:
    model, pictures = make("git"), make_pictures("git", 1)
    model.output.bias.data[END] = 100.0
    with pytest.raises(TargetError, match="writes an empty caption"):
        find_family(model, CaptionerAdapter).write(pictures)
    with pytest.raises(TargetError, match="one image, but the batch has 2"):
        find_family(model, CaptionerAdapter).write(make_pictures("git"))


def test_pictures_that_a_model_takes_in_pieces() -> None:
    """Check that flattened patches are refused: without an image, there is nothing to draw a map on."""
    rows = {"pixel_values": torch.rand(16, 192), "input_ids": torch.tensor([[1, 5]])}
    with pytest.raises(ImageError, match="none of them is a floating-point tensor"):
        gradcam.explain(make("git"), rows, target=Token(CAPTION))


class CleaningTokenizer:
    """A tokenizer that joins word pieces, and removes the space before a full stop, as BERT's does."""

    pieces = ("a", "dog", "##s", "run", ".", "fast")

    def decode(self, tokens: Any) -> str:
        return " ".join(self.pieces[token] for token in tokens).replace(" ##", "").replace(" .", ".")


def test_a_caption_is_split_with_its_spaces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gradcam.adapters.captioning.load_tokenizer", lambda _: CleaningTokenizer())
    family = find_family(make("git"), CaptionerAdapter)
    assert family.split_caption([0, 1, 2, 3, 4, 5]) == ["a", " dog", "s", " run", ".", " fast"]
