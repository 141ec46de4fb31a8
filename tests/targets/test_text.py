"""Test sentences as targets: their tokenisation, one embedding per run, and the messages if that is impossible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import gradcam
from gradcam.errors import TargetError
from gradcam.targets.text import Text
from tests.adapters.test_embedding import PICTURES, Own, awake, open_clip, towers
from tests.helpers import assert_same, traces

WORDS = ["a", "dog", "cat", "sits", "on", "the", "red", "blue", "sofa", "and", "there", "is", "an", "empty", "one"]
SENTENCES = ["a dog", "the red cat sits on a sofa"]


def word_tokenizer(longest: int = 12, words: Sequence[str] = WORDS) -> Any:
    """Return a Hugging Face tokenizer with these words."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[BOS]", "[EOS]", "[UNK]", *words])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 1), ("[EOS]", 2)]
    )
    special_tokens = {"unk_token": "[UNK]", "pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=longest, **special_tokens)


def save(model: Any, folder: Path, tokenizer: Any = None) -> Any:
    """Save a model to a folder, with or without a tokenizer, and load it."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return type(model).from_pretrained(folder).double().eval()


@pytest.fixture
def clip(tmp_path: Path) -> Any:
    return save(towers("CLIP", projection_dim=12), tmp_path, word_tokenizer())


def cosines(pictures: Tensor, sentences: Tensor) -> Tensor:
    return torch.stack([F.cosine_similarity(pictures, sentence[None]) for sentence in sentences], 1).detach()


def embed(model: Any, **tokens: Tensor) -> Tensor:
    return model.get_text_features(**tokens).pooler_output


def see(model: Any) -> Tensor:
    return model.get_image_features(pixel_values=PICTURES).pooler_output


def expected_scores(model: Any) -> Tensor:
    tokens = [word_tokenizer()([sentence], return_tensors="pt") for sentence in SENTENCES]
    return cosines(see(model), torch.cat([embed(model, **sentence_tokens) for sentence_tokens in tokens]))


def count_runs(module: nn.Module) -> list[int]:
    """Count the rows of each run of a module."""
    runs: list[int] = []
    module.register_forward_pre_hook(lambda _, __, kwargs: runs.append(len(kwargs["input_ids"])), with_kwargs=True)
    return runs


def score(model: Any, text: Any = SENTENCES, **options: Any) -> Tensor:
    return gradcam.explain(model, PICTURES, method="gradcam", target=Text(text, **options)).scores.double()


def assert_close(maps: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(maps, expected, rtol=1e-6, atol=1e-7)


def test_sentences_are_embedded_by_the_models_own_parts(clip: Any) -> None:
    expected = expected_scores(clip)
    assert_close(score(clip), expected)
    assert_close(score(clip, SENTENCES[1]), expected[:, 1:])
    assert expected.std() > 0.01


def test_against_is_the_mean_of_the_others(clip: Any) -> None:
    contrasts = ["an empty sofa", "there is one"]
    plain, rivals = score(clip), score(clip, contrasts)
    assert_close(score(clip, against=contrasts), plain - rivals.mean(1, keepdim=True))
    assert_close(score(clip, against=contrasts[0]), plain - rivals[:, :1])
    explanation = gradcam.explain(clip, PICTURES, method="gradcam", target=Text(SENTENCES, against=contrasts))
    described = [(instance.kind, instance.name, instance.against) for instance in explanation.instances[0]]
    assert described == [("text", sentence, tuple(contrasts)) for sentence in SENTENCES]
    message = torch.tensor([[item.score for item in row] for row in explanation.instances], dtype=torch.float64)
    assert_close(message, plain)


def test_siglip_fills_sentences_up_as_in_training(tmp_path: Path) -> None:
    model = save(towers("Siglip"), tmp_path, word_tokenizer())
    tokens = word_tokenizer()(SENTENCES, padding="max_length", max_length=12, return_tensors="pt")
    assert_close(score(model), cosines(see(model), embed(model, **tokens)))


def test_open_clip_has_a_tokenizer() -> None:
    library = pytest.importorskip("open_clip")
    model = open_clip()
    tokens = library.tokenizer.SimpleTokenizer(context_length=12)(SENTENCES)
    expected = cosines(model.encode_image(PICTURES), model.encode_text(tokens))
    assert_close(score(model), expected)
    assert_close(score(open_clip("CustomTextCLIP"), SENTENCES).std() * 0, torch.tensor(0.0, dtype=torch.float64))
    message = (
        r"has 18 tokens, but the model takes at most 12. "
        r"The model would ignore the words after '\.\.\. on the sofa and'"
    )
    with pytest.raises(TargetError, match=message):
        score(model, "a dog and a cat sit on the sofa and on the red chair and sleep")


def test_open_clip_with_another_vocabulary() -> None:
    library = pytest.importorskip("open_clip")
    vision = {"image_size": 32, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8}
    text = {"width": 16, "heads": 2, "layers": 1, "context_length": 12, "vocab_size": 30}
    model = awake(library.CLIP(12, vision, text))
    with pytest.raises(
        TargetError, match=r"No tokenizer of open_clip fits the vocabulary .* tokenizer=open_clip.get_tokenizer\(NAME\)"
    ):
        score(model)
    tokens = word_tokenizer()(SENTENCES, padding="max_length", max_length=12, return_tensors="pt")["input_ids"]
    expected = cosines(model.encode_image(PICTURES), model.encode_text(tokens))
    assert_close(score(model, tokenizer=word_tokenizer()), expected)


def test_towers_of_a_users_own() -> None:
    model = Own().double().eval()
    expected = cosines(model.encode_image(PICTURES), model.encode_text(model.tokenizer(SENTENCES)))
    assert_close(score(model), expected)
    model.tokenizer = None  # type: ignore[assignment]
    with pytest.raises(TargetError, match=r"This Own has no tokenizer: pass Text\(..., tokenizer="):
        score(model)
    assert_close(score(model, tokenizer=Own().tokenizer), expected)


@pytest.mark.parametrize(
    "form",
    [lambda tokens: dict(tokens), lambda tokens: tokens["input_ids"], lambda tokens: tokens["input_ids"].tolist()],
)
def test_a_tokenizer_of_ones_own(form: Callable[[Any], Any]) -> None:
    model, tokenizer = towers("CLIP", projection_dim=12), word_tokenizer()
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    text_inputs = {"input_ids": tokens["input_ids"]} if isinstance(form(tokens), (Tensor, list)) else dict(tokens)
    expected = cosines(see(model), embed(model, **text_inputs))
    actual = score(model, tokenizer=lambda texts: form(tokenizer(texts, padding=True, return_tensors="pt")))
    assert_close(actual, expected)


# Embedded once


def test_sentences_are_embedded_once(clip: Any) -> None:
    runs = count_runs(clip.text_model)
    first = score(clip)
    assert runs == [2]  # a single batch of two rows
    assert_close(score(clip), first)
    assert runs == [2]
    both = score(clip, [SENTENCES[1], "a cat", "a cat"])
    assert runs == [2, 1]
    assert_close(both[:, 0], first[:, 1])
    assert_close(both[:, 1], both[:, 2])


def change_in_place(model: Any) -> None:
    with torch.no_grad():
        model.text_model.encoder.layers[0].mlp.fc1.weight.mul_(1.5)


def change_data(model: Any) -> None:
    model.text_projection.weight.data.mul_(torch.linspace(0.5, 2, 12, dtype=torch.float64)[:, None])


def load_others(model: Any) -> None:
    torch.manual_seed(9)
    state = model.state_dict()
    text = {name: item for name, item in state.items() if name.startswith("text") and item.is_floating_point()}
    model.load_state_dict(state | {name: item + 0.3 * torch.randn_like(item) for name, item in text.items()})


def replace_one(model: Any) -> None:
    model.text_projection.weight = nn.Parameter(model.text_projection.weight.detach().flip(0).clone())


@pytest.mark.parametrize("change", [change_in_place, change_data, load_others, replace_one])
def test_a_tower_that_changed_embeds_again(clip: Any, change: Callable[[Any], None]) -> None:
    before = score(clip)
    runs = count_runs(clip.text_model)
    change(clip)
    expected = expected_scores(clip)
    runs.clear()
    after = score(clip)
    assert runs == [2]
    assert_close(after, expected)
    assert (after - before).abs().max() > 1e-3


def test_the_tower_of_pictures_may_change(clip: Any) -> None:
    score(clip)
    runs = count_runs(clip.text_model)
    with torch.no_grad():
        for parameter in (*clip.vision_model.parameters(), clip.visual_projection.weight):
            parameter.mul_(1.1)
    score(clip)
    assert runs == []


def test_each_tokenizer_has_embeddings_of_its_own(clip: Any) -> None:
    reversed_tokenizer = word_tokenizer(words=WORDS[::-1])
    plain, actual = score(clip), score(clip, tokenizer=reversed_tokenizer)
    assert (plain - actual).abs().max() > 1e-3
    assert_close(score(clip), plain)
    assert_close(score(clip, tokenizer=reversed_tokenizer), actual)


def test_nothing_is_left_behind(clip: Any) -> None:
    expected = score(clip)
    clip.train().requires_grad_(True)
    clip.text_model.config.attention_dropout = 0.5
    for layer in clip.text_model.encoder.layers:
        layer.self_attn.dropout = 0.5
    with torch.no_grad():
        clip.text_projection.weight.mul_(1.0)  # this in-place operation counts as a change
    runs = count_runs(clip.text_model)
    before = traces(clip)
    with torch.inference_mode():
        assert_close(score(clip), expected)
    assert runs == [2]
    assert_same(before, traces(clip))
    assert all(parameter.grad is None for parameter in clip.parameters())


def test_threads_share_what_is_embedded(clip: Any) -> None:
    expected, failures = score(clip, WORDS), []
    with torch.no_grad():
        clip.text_projection.weight.mul_(1.0)

    def work(start: int) -> None:
        for i in range(start, start + 6):
            if not torch.allclose(score(clip, WORDS[i]), expected[:, i : i + 1], rtol=1e-5, atol=1e-7):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 3, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_half_precision(clip: Any) -> None:
    full = gradcam.explain(clip, PICTURES, target=Text(SENTENCES))
    half = gradcam.explain(clip.bfloat16(), PICTURES.bfloat16(), target=Text(SENTENCES))
    torch.testing.assert_close(half.scores, full.scores, rtol=0.1, atol=0.03)
    assert torch.corrcoef(torch.stack([full.maps.flatten(), half.maps.flatten()]))[0, 1] > 0.97


def test_views_of_the_pictures(clip: Any) -> None:
    layer = "vision_model.encoder.layers.1.layer_norm1"

    def maps(pictures: Tensor, augmentation: str = "none") -> Tensor:
        options = {"method": "gradcam", "evidence": "signed", "augmentation": augmentation}
        return gradcam.explain(clip, pictures, layer, target=Text(SENTENCES), **options).maps

    expected = (maps(PICTURES) + maps(PICTURES.flip(-1)).flip(-1)) / 2
    torch.testing.assert_close(maps(PICTURES, "flip"), expected, rtol=1e-5, atol=1e-8)


# Errors


def test_a_sentence_that_is_too_long(clip: Any) -> None:
    text = "a red dog and a blue cat sits on the red sofa and there is one"
    message = (
        r"has 18 tokens, but the model takes at most 12. "
        r"The model would ignore the words after '\.\.\. cat sits on the'"
    )
    with pytest.raises(TargetError, match=message):
        score(clip, text)
    with pytest.raises(TargetError, match=message):
        score(clip, ["a dog", text])
    assert score(clip, " ".join(text.split()[:10])).shape == (2, 1)  # the longest sentence that fits
    with pytest.raises(TargetError, match="the model takes at most 12"):  # only the text tower knows this limit
        score(clip, text, tokenizer=word_tokenizer(longest=10**9))


def test_a_model_without_a_tokenizer_folder(tmp_path: Path) -> None:
    model = towers("CLIP", projection_dim=12)
    message = r"No tokenizer was found for the model \(the model was not loaded from a folder\): save"
    with pytest.raises(TargetError, match=message):
        score(model)
    model = save(model, tmp_path)
    message = r"No tokenizer was found for the model, .*: save the tokenizer in the model's folder .* tokenizer="
    with pytest.raises(TargetError, match=message):
        score(model)
    word_tokenizer().save_pretrained(tmp_path)
    assert score(model).shape == (2, 2)  # now the model has a tokenizer


@pytest.mark.parametrize("text", ["", "  ", [], ["a dog", ""], [" "]])
def test_empty_sentences(text: Any) -> None:
    with pytest.raises(TargetError, match=r"text is .*: a sentence is empty"):
        Text(text)


def test_what_is_no_sentence() -> None:
    for text in (None, 3, ["a dog", 3], b"a dog", torch.tensor([1, 2]), torch.zeros(1, 2, 3), torch.zeros(0, 4)):
        with pytest.raises(TargetError, match=r"text is .*, expected "):
            Text(text)
    with pytest.raises(TargetError, match="against is 3, expected one or several sentences"):
        Text("a dog", against=3)
    with pytest.raises(TargetError, match="against is .*a sentence is empty"):
        Text("a dog", against=["a cat", ""])
    with pytest.raises(TargetError, match="The tokenizer is 'words', expected a function"):
        Text("a dog", tokenizer="words")


@pytest.mark.parametrize("kind", ["torchvision", "transformers", "DINOv2"])
def test_sentences_of_a_model_without_text(kind: str) -> None:
    model: nn.Module = torchvision.models.resnet18(weights=None)
    if kind != "torchvision":
        library = pytest.importorskip("transformers")
        config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config |= {"image_size": 32, "patch_size": 8}
        if kind == "DINOv2":
            model = library.Dinov2Model(library.Dinov2Config(**config))
        else:
            model = library.ViTForImageClassification(library.ViTConfig(**config, intermediate_size=16))
    with pytest.raises(TargetError, match=r"has no text encoder: .*pass a class \(target=281, --class\)"):
        gradcam.explain(model.double().eval(), PICTURES, target=Text("a dog"))


def test_an_embedding_of_nothing(clip: Any) -> None:
    with pytest.raises(TargetError, match="An embedding is zero, infinite or NaN"):
        score(clip, torch.zeros(12))
    assert_close(score(clip, 5 * torch.ones(12)), score(clip, torch.ones(1, 12)))
