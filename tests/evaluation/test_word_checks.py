"""Test the check of a word's heatmap on a small Qwen2-VL, whose processor cuts images into pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import gradcam
from gradcam.errors import TargetError
from gradcam.evaluation import check
from gradcam.models.instance_scores import find_instance_classifier, to_instance_classifier
from gradcam.models.preprocess import WholeImage
from gradcam.models.task_models import Captioner
from gradcam.targets import Instance, Token
from gradcam.targets.word_controls import describe_word_from_text

pytest.importorskip("transformers")
from transformers import GitConfig, GitForCausalLM

from gradcam.adapters.vision_language import QwenVl
from tests import colour_model
from tests.drawn.captioner import encode, load_folder
from tests.drawn.captions import CaptionScene, draw_caption_scene

SCENE = draw_caption_scene([777, 6])  # "there is a blue square below a black ring"
IS, BLUE, SQUARE = 1, 3, 4  # positions of words


class PromptedCaptioner(Captioner):
    """The small Qwen2-VL with a fixed prompt."""

    def to_batch(self, prepared: Any) -> Any:
        scenes = [CaptionScene(item.reading.picture, SCENE.prompt, ()) for item in prepared]
        return QwenVl(self.model).to_pieces(encode(PROCESSOR, scenes))


MODEL, PROCESSOR = load_folder()
TOKENS: list[int] = PROCESSOR.tokenizer.convert_tokens_to_ids([word.text for word in SCENE.words])


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    fields: Any = {"family": QwenVl(MODEL)}
    return PromptedCaptioner("captioner", MODEL, WholeImage(), 0, None, None, "auto", **fields)


@pytest.fixture(scope="module")
def verdict(captioner: Captioner) -> gradcam.evaluation.Verdict:
    return check(captioner, SCENE.image, target=Token(TOKENS, SQUARE))


def predict_by_hand(image: NDArray[np.uint8], position: int, **changes: Any) -> float:
    """Return the probability of a word, given the image and the earlier words of the answer."""
    inputs = encode(PROCESSOR, [CaptionScene(image, SCENE.prompt, SCENE.words[:position])])
    ids = torch.cat([inputs["input_ids"], torch.tensor([TOKENS[:position]], dtype=torch.int64)], 1)
    types = torch.cat([inputs["mm_token_type_ids"], torch.zeros(1, position, dtype=torch.int64)], 1)
    arguments = {
        **inputs,
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": types,
        **changes,
    }
    with torch.no_grad():
        return float(MODEL(**arguments).logits[0, -1].softmax(0)[TOKENS[position]])


def predict_without_image(position: int) -> float:
    patches = encode(PROCESSOR, [SCENE])["pixel_values"]
    return predict_by_hand(SCENE.image, position, pixel_values=torch.full_like(patches, float(patches.mean())))


@pytest.fixture
def runs() -> Iterator[list[None]]:
    """Count how often the model runs."""
    count: list[None] = []
    handle = MODEL.register_forward_hook(lambda *_: count.append(None))
    yield count
    handle.remove()


def test_a_word_that_follows_from_the_text_is_not_tested(captioner: Captioner, runs: list[None]) -> None:
    verdict = check(captioner, SCENE.image, target=Token(TOKENS, IS))
    assert len(runs) < 12
    assert (verdict.outcome, [test.name for test in verdict.tests], verdict.controls) == ("undecided", ["covering"], ())
    probabilities = predict_by_hand(SCENE.image, IS), predict_without_image(IS)
    assert verdict.tests[0].reason == (
        f"The image hardly changes the probability of 'is' ({probabilities[0]:#.2g} with it, {probabilities[1]:#.2g} "
        "without): the map of this word says nothing about the image."
    )
    assert verdict.summary == ""
    record = verdict.to_record()
    assert record["from_text"] is True
    assert (record["probability"], record["without_image"]) == pytest.approx(probabilities, abs=1e-5)
    assert verdict.panel().shape[2] == 3


def test_a_word_is_compared_with_other_words_and_other_images(verdict: gradcam.evaluation.Verdict) -> None:
    assert [test.name for test in verdict.tests] == ["stability", "classes", "randomisation", "covering"]
    names = [control.name for control in verdict.controls]
    model_maps = ["another image", "another word", "random weights"]
    assert names == ["mirrored", "shifted", *model_maps, "noise", "centre", "edges"]
    record = verdict.to_record()
    assert (record["label"], record["word"], record.get("from_text")) == ("square", SQUARE, None)
    assert record["probability"] == pytest.approx(predict_by_hand(SCENE.image, SQUARE), abs=1e-5)
    assert record["without_image"] == pytest.approx(predict_without_image(SQUARE), abs=1e-5)
    assert "another word" in verdict.tests[1].reason


def test_the_rivals_depend_on_the_image(captioner: Captioner, verdict: gradcam.evaluation.Verdict) -> None:
    ratios = {i: predict_without_image(i) / predict_by_hand(SCENE.image, i) for i in range(len(TOKENS)) if i != SQUARE}
    rivals = sorted(ratios, key=lambda i: ratios[i])[:4]
    explanation = captioner.explain(SCENE.image, target=Token(TOKENS, rivals))
    maps = verdict.artifacts.rival_maps
    assert maps is not None
    assert torch.allclose(maps, explanation.heatmaps[0], atol=1e-4)
    assert ["square" in name for name in verdict.artifacts.rival_names] == [False] * 4


@pytest.mark.parametrize("options", [{}, {"score": "logprob"}, {"against": "circle"}], ids=str)
def test_the_checked_heatmap_is_the_heatmap_of_explain(captioner: Captioner, options: dict[str, Any]) -> None:
    target = Token(TOKENS, SQUARE, **options)
    classifier, index = find_instance_classifier(captioner, captioner.prepare(SCENE.image), target)
    images = classifier.batch([SCENE.image])
    assert images.shape[2:] == SCENE.image.shape[:2]
    explainer = gradcam.evaluation.Explainer([classifier.method], classifier.layer, activation=classifier.activation)
    heatmap = explainer.only(classifier.method)(classifier.model, images, torch.tensor([index]))
    assert torch.allclose(heatmap, captioner.explain(SCENE.image, target=target).heatmaps[:, 0], atol=1e-4)


def test_parts_of_the_image_are_covered_before_the_processor_runs(captioner: Captioner) -> None:
    classifier = to_instance_classifier(captioner, captioner.prepare(SCENE.image), Token(TOKENS, [SQUARE, BLUE]))
    covered = SCENE.image.copy()
    covered[60:, :66] = 90
    pixels = torch.from_numpy(np.stack([SCENE.image, covered])).permute(0, 3, 1, 2).float()
    with torch.no_grad():
        probabilities = classifier.model(pixels)
    expected = [[predict_by_hand(image, position) for position in (SQUARE, BLUE)] for image in (SCENE.image, covered)]
    assert torch.allclose(probabilities, torch.tensor(expected), atol=1e-5)
    assert abs(expected[0][0] - expected[1][0]) > 0.1


def test_a_map_of_another_word_does_not_pass(captioner: Captioner) -> None:
    black = [word.text for word in SCENE.words].index("black")
    explainer = gradcam.evaluation.Explainer(["hirescam"], "module.module.model.visual.merger.ln_q")
    explain = explainer.only("hirescam")
    numbers = {0: black, black: 0}  # `check` numbers the tested word 0, and the words before it from 1

    def explain_another_word(model: nn.Module, images: Tensor, classes: Tensor) -> Any:
        return explain(model, images, torch.tensor([numbers.get(int(classes), int(classes))]))

    verdict = check(captioner, SCENE.image, target=Token(TOKENS, SQUARE), method=explain_another_word)
    assert verdict.outcome != "passed"


@pytest.mark.parametrize(
    "target", [Token(TOKENS[SQUARE : SQUARE + 1]), Token(TOKENS, SQUARE, against="circle")], ids=["one", "two"]
)
def test_a_word_without_another_word_has_a_rival(captioner: Captioner, target: Token) -> None:
    verdict = check(captioner, SCENE.image, target=target)
    assert verdict.tests[0].name in ("stability", "covering")
    assert "another word" not in [control.name for control in verdict.controls]


def test_the_record_is_as_the_schema_says(
    captioner: Captioner, verdict: gradcam.evaluation.Verdict, tmp_path: Path
) -> None:
    schema = json.loads((Path(__file__).parents[2] / "docs/reference/check.schema.json").read_text(encoding="utf-8"))
    filler = check(captioner, SCENE.image, target=Token(TOKENS, IS))
    image_verdict = check(colour_model.load(), colour_model.paint(tmp_path / "green.png", 1, seed=1))
    assert image_verdict.resolution is not None
    for record in (verdict.to_record(), filler.to_record(), image_verdict.to_record()):
        jsonschema.validate(record, {**schema, "additionalProperties": False})


def test_words_by_their_number(captioner: Captioner) -> None:
    classifier, index = find_instance_classifier(captioner, captioner.prepare(SCENE.image), Token(TOKENS, word=SQUARE))
    assert (index, classifier.instance(index).name, len(classifier.instances)) == (SQUARE, "square", len(TOKENS))


def test_phrases_are_compared_with_the_remaining_tokens(captioner: Captioner) -> None:
    target = Token(TOKENS, [(BLUE, SQUARE)])
    classifier, index = find_instance_classifier(captioner, captioner.prepare(SCENE.image), target)
    assert (index, classifier.instance(index).name, len(classifier.instances)) == (0, "blue square", len(TOKENS) - 1)


def test_maps_from_several_words_are_refused(captioner: Captioner) -> None:
    with pytest.raises(TargetError, match="Only one word.s map is tested"):
        check(captioner, SCENE.image, target=Token(TOKENS, context="subtract"))


def test_captioners_that_take_whole_images() -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    ends = {"vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    config = GitConfig(**small, **ends, vision_config=small | {"image_size": 32, "patch_size": 8})
    preprocessing: Any = {"size": 32, "crop": 1, "mean": (0, 0, 0), "std": (1, 1, 1)}
    captioner = gradcam.load_model(GitForCausalLM(config), **preprocessing)
    image = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    classifier = to_instance_classifier(captioner, captioner.prepare(image), Token([5, 9, 7]))
    images = classifier.batch([image])
    with torch.no_grad():
        logits = captioner.model(pixel_values=images, input_ids=torch.tensor([[1, 5, 9]])).logits[0, -3:]
        probabilities = classifier.model(images)
    assert torch.allclose(probabilities[0], logits.softmax(1)[range(3), [5, 9, 7]], atol=1e-6)
    verdict = check(captioner, image, target=Token([5, 9, 7], 1))
    assert verdict.to_record()["from_text"] is True  # random weights


def test_words_whose_probability_the_image_lowers() -> None:
    word = Instance("word", "of", score=0.1, without_image=0.8)
    assert "The image lowers the probability of 'of' (0.10 with it, 0.80 without)" in str(describe_word_from_text(word))
    assert describe_word_from_text(Instance("word", "of", score=0.9, without_image=0.1)) is None
