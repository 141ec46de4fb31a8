"""Test vision-language models with their own processors: prompts, regions, and several images in one prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import gradcam
from gradcam.errors import GradcamError, ImageError, ModelError, TargetError
from gradcam.targets import Token

pytest.importorskip("transformers")

import transformers as T

from tests.adapters.vlm import (
    FAMILIES,
    IMAGE,
    make,
    make_image,
    make_processor,
    square_processor,
    text_config,
    vision_config,
)
from tests.adapters.vlm_folders import make_parts, save_folder

WIDE, TALL = make_image((48, 96)), make_image((96, 64), seed=1)
FORMS = {"llava": "USER: {0}\n{1} ASSISTANT:", "paligemma": "{0}{1}", "florence2": "{1}"}
NAMES = (
    "llava", "llava_next", "onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "aya", "llama4", "smolvlm",
    "idefics3", "paligemma", "gemma3", "florence2", "pixtral", "mistral3",
)  # fmt: skip


def process(name: str, processor: Any, prompt: str, *images: np.ndarray) -> dict[str, Any]:
    """Return the processor's output for a prompt that is written by hand."""
    marks = (f"{FAMILIES[name].image} " if name not in FORMS else FAMILIES[name].image) * len(images)
    text = FORMS.get(name, "USER: {0}{1} ASSISTANT:").format(marks, prompt)
    pictures = [Image.fromarray(image) for image in images]
    output = processor(images=[pictures] if FAMILIES[name].is_nested else pictures, text=[text], return_tensors="pt")
    return {key: value for key, value in output.items() if isinstance(value, torch.Tensor)}


class TestProcessor:
    """Test that the model's own processor gets the image as it is, together with the prompt."""

    @pytest.mark.parametrize("name", NAMES)
    def test_maps_equal_those_of_the_processor_s_output(self, name: str, tmp_path: Path) -> None:
        captioner = gradcam.load_model(f"hf:{save_folder(name, tmp_path)}")
        assert captioner.task == "captioning"
        for image in (WIDE, TALL):
            explanation = captioner.explain(image, target=Token([5, 6], prompt="what is on the table"))
            inputs = process(name, FAMILIES[name].make_processor("torchvision"), "what is on the table", image)
            plain = gradcam.explain(captioner.model, inputs, target=Token([5, 6]))
            torch.testing.assert_close(explanation.maps, plain.maps)
            assert (explanation.prompt, explanation.answer) == ("what is on the table", "is on")
            assert explanation.overlay().shape == image.shape

    def test_an_object_with_its_processor(self) -> None:
        model, processor = make_parts("qwen2_vl")
        captioner = gradcam.load_model(model, processor=processor)
        assert captioner.prompt == "Describe the picture in a sentence."  # type: ignore[attr-defined]
        explanation = captioner.explain(WIDE, target=Token(prompt="what is on the table", max_tokens=6))
        inputs = process("qwen2_vl", processor, "what is on the table", WIDE)
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=6)[0, inputs["input_ids"].shape[1] :]
        assert explanation.answer == processor.tokenizer.decode(ids, skip_special_tokens=True)
        plain = gradcam.explain(model, inputs, target=Token(ids))
        torch.testing.assert_close(explanation.maps, plain.maps)
        assert explanation.maps.shape[1] == len(ids)

    def test_images_of_16_bits(self) -> None:
        model, processor = make_parts("qwen2_vl")
        captioner = gradcam.load_model(model, processor=processor)
        deep = WIDE.astype(np.uint16) * 257
        first, second = (captioner.explain(image, target=Token([5])) for image in (WIDE, deep))
        torch.testing.assert_close(first.maps, second.maps)

    @pytest.mark.parametrize("name", ["llava", "qwen2_vl", "llava_next", "smolvlm", "paligemma"])
    def test_several_images_in_one_prompt(self, name: str) -> None:
        model, processor = make_parts(name)
        captioner = gradcam.load_model(model, processor=processor)
        target = Token([5, 6], prompt="what is on the table")
        explanation = captioner.explain((WIDE, TALL), target=target)
        plain = gradcam.explain(
            model, process(name, processor, "what is on the table", WIDE, TALL), target=Token([5, 6])
        )
        torch.testing.assert_close(explanation.maps, plain.maps)
        assert explanation.maps.shape[:2] == (2, 2)
        assert [explanation.overlay(i).shape for i in range(2)] == [WIDE.shape, TALL.shape]
        with pytest.raises(ImageError, match="explain the images one by one"):
            captioner.explain([WIDE, TALL], target=target)


class TestRegion:
    """Test which part of the image the heatmap covers."""

    def test_a_centre_crop(self) -> None:
        model, processor = make_parts("llava")
        captioner = gradcam.load_model(model, processor=processor)
        explanation = captioner.explain(WIDE, target=Token([5]))
        assert explanation.regions == [(0, 24, 48, 48)]
        square = captioner.explain(WIDE[:, 24:72], target=Token([5]))
        assert square.regions == [(0, 0, 48, 48)]
        torch.testing.assert_close(explanation.maps, square.maps, rtol=0.1, atol=0.1 * float(square.maps.max()))

    def test_padding_to_a_square(self) -> None:
        _, processor = make_parts("llava")
        vision = vision_config("clip_vision_model", 112, patch_size=28)
        model = make("Llava", IMAGE, vision_config=vision, text_config=text_config())
        sides = {"size": {"shortest_edge": 112}, "crop_size": {"height": 112, "width": 112}}
        processor.patch_size = 28
        processor.image_processor = T.LlavaImageProcessor(do_pad=True, **sides)
        explanation = gradcam.load_model(model, processor=processor).explain(WIDE, target=Token([5]))
        assert explanation.regions == [(0, 0, 48, 96)]
        inputs = process("llava", processor, "Describe the picture in a sentence.", WIDE)
        plain = gradcam.explain(model, inputs, target=Token([5]))
        assert plain.maps.shape[2:] == (4, 4)
        torch.testing.assert_close(explanation.maps, plain.maps[:, :, 1:3])  # the rows that are not padding
        assert explanation.heatmaps.shape[2:] == (56, 112)

    @pytest.mark.parametrize("name", ["paligemma", "qwen2_vl", "llava_next", "smolvlm"])
    def test_the_whole_image(self, name: str) -> None:
        model, processor = make_parts(name)
        explanation = gradcam.load_model(model, processor=processor).explain(WIDE, target=Token([5]))
        assert explanation.regions == [(0, 0, 48, 96)]


class TestWrongInput:
    """Test that each wrong use gives one clear line."""

    def test_a_model_without_a_processor(self) -> None:
        model, processor = make_parts("qwen2_vl")
        with pytest.raises(ModelError, match=r"no processor .*gradcam\.load_model\(model, processor=processor\)"):
            gradcam.load_model(model)
        for wrong in (processor.image_processor, processor.tokenizer, "folder"):
            with pytest.raises(ModelError, match="has no image processor or no tokenizer"):
                gradcam.load_model(model, processor=wrong)
        with pytest.raises(ModelError, match="leave out size, crop, mean and std"):
            gradcam.load_model(model, processor=processor, size=28)
        with pytest.raises(ModelError, match="takes one prompt, but 2 were given"):
            gradcam.load_model(model, processor=processor, prompts=["a", "b"])
        with pytest.raises(ModelError, match="A processor is for captioning models"):
            gradcam.load_model("efficientnet_lite0", processor=processor)

    def test_prompts_that_cannot_be_written(self) -> None:
        model, processor = make_parts("gemma3")
        cases = {
            "{{ messages[0]['content'][1]['text'] }}": "no placeholder|cannot write a prompt",
            "{{ nothing.at.all }}": "cannot write a prompt for Gemma3.*set the chat_template",
        }
        for template, message in cases.items():
            processor.chat_template = template
            captioner = gradcam.load_model(model, processor=processor)
            with pytest.raises(GradcamError, match=message) as caught:
                captioner.explain(WIDE, target=Token([5]))
            assert "\n" not in str(caught.value)

    def test_a_processor_of_another_model(self) -> None:
        model, _ = make_parts("llava")
        other = make_processor("Qwen2VL", square_processor("CLIP", "torchvision", 56, do_center_crop=False))
        captioner = gradcam.load_model(model, processor=other)
        with pytest.raises(GradcamError) as caught:
            captioner.explain(WIDE, target=Token([5]))
        assert "\n" not in str(caught.value)

    def test_prompts_of_models_without_one(self) -> None:
        git = FAMILIES["git"].make_model()
        captioner = gradcam.load_model(git, size=56, mean=[0] * 3, std=[1] * 3)
        with pytest.raises(TargetError, match="GitForCausalLM takes no prompt: leave the prompt out"):
            captioner.explain(WIDE, target=Token([5], prompt="what"))
        blip = gradcam.load_model(FAMILIES["blip"].make_model(), size=56, mean=[0] * 3, std=[1] * 3)
        with pytest.raises(TargetError, match="has no processor that writes a prompt"):
            blip.explain(WIDE, target=Token([5], prompt="what"))


def test_two_captioners_of_one_module_use_different_processors() -> None:
    model, processor = make_parts("qwen2_vl")
    first = gradcam.load_model(model, processor=processor)
    target = Token([5, 6], word=0, prompt="what is on the table")
    before = first.explain(WIDE, target=target)
    _, second_processor = make_parts("qwen2_vl")
    second_processor.tokenizer.decode = lambda ids, **options: "".join(f" x{token}" for token in ids)
    second_processor.image_processor.size = {"shortest_edge": 30000, "longest_edge": 40000}
    second = gradcam.load_model(model, processor=second_processor)
    after, changed = first.explain(WIDE, target=target), second.explain(WIDE, target=target)
    assert (before.answer, after.answer, changed.answer) == ("is on", "is on", "x5 x6")
    assert [item.instances[0][0].name for item in (before, after, changed)] == ["is", "is", "x5"]  # type: ignore[index]
    torch.testing.assert_close(after.maps, before.maps)
    assert changed.maps.shape != before.maps.shape
