"""Test the small Qwen2-VL of drawn scenes, which other tests explain, and the regions of the words of its answers."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import gradcam
from gradcam.cli import cli
from tests.drawn.captions import (
    COLOUR_ORDER,
    QUESTIONS,
    SHAPES,
    SIZES,
    CaptionScene,
    Word,
    draw_caption_scene,
    draw_caption_scenes,
)
from tests.drawn.pictures import COLOURS

pytest.importorskip("transformers")
from tests.drawn.captioner import FOLDER, encode, load_folder, measure_accuracy

SEED = 90210  # training uses another seed, and other photographs
COUNT = 40


@pytest.fixture(scope="module")
def captioner() -> tuple[Any, Any]:
    return load_folder()


def generate(captioner: tuple[Any, Any], scenes: list[CaptionScene]) -> list[str]:
    model, processor = captioner
    inputs = encode(processor, scenes)
    tokens = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    return processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def is_near(image: np.ndarray, mask: np.ndarray, colour: str) -> bool:
    """Return whether the median colour of the masked pixels is nearer to this colour than to any other."""
    median = np.median(image[mask], axis=0)
    distances = {name: np.linalg.norm(median - COLOURS[name]) for name in COLOUR_ORDER}
    return min(distances, key=distances.__getitem__) == colour


def pairs(words: Iterable[Word]) -> list[tuple[Word, Word]]:
    """Return the colour and the object of each shape that an answer names."""
    named = [word for word in words if word.kind in ("colour", "object")]
    return list(zip(named[::2], named[1::2], strict=True))


def test_the_folder_has_the_size_that_a_repository_can_take() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 4e6


def test_the_model_describes_scenes_that_it_was_not_trained_on(captioner: tuple[Any, Any]) -> None:
    accuracy = measure_accuracy(*captioner, list(draw_caption_scenes(SEED, COUNT)))
    assert min(accuracy["object"], accuracy["colour"]) >= 0.95
    assert accuracy["relation"] >= 0.75  # 0.92 on these 40 scenes, but 0.74 on 80 scenes of another seed
    assert accuracy["filler"] == 1


def test_the_model_names_the_shape_at_a_side(captioner: tuple[Any, Any]) -> None:
    accuracy = measure_accuracy(*captioner, list(draw_caption_scenes(SEED, COUNT, "what")))
    assert accuracy["object"] >= 0.9


def test_the_model_ends_its_answers(captioner: tuple[Any, Any]) -> None:
    scenes = list(draw_caption_scenes(SEED, 16))
    assert sum(answer == scene.answer for answer, scene in zip(generate(captioner, scenes), scenes)) >= 11


@pytest.mark.parametrize("size", SIZES)
def test_the_processor_keeps_the_size(captioner: tuple[Any, Any], size: tuple[int, int]) -> None:
    _, processor = captioner
    inputs = encode(processor, [draw_caption_scene(1, size=size)])
    assert inputs["image_grid_thw"].tolist() == [[1, size[0] // 8, size[1] // 8]]
    assert int((inputs["input_ids"] == processor.image_token_id).sum()) == size[0] * size[1] // 256


def test_every_word_is_one_token(captioner: tuple[Any, Any]) -> None:
    tokenizer = captioner[1].tokenizer
    assert len(tokenizer) <= 60
    for question in QUESTIONS:
        for scene in draw_caption_scenes(SEED, 20, question):
            texts = re.findall(r"\w+|[.?]", scene.prompt.lower()) + [word.text for word in scene.words]
            assert tokenizer.tokenize(f"{scene.prompt} {scene.answer}") == texts
            assert tokenizer.decode(tokenizer(scene.answer)["input_ids"]) == scene.answer


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_mask_of_a_word_is_the_shape_that_it_names(question: str) -> None:
    for scene in draw_caption_scenes(SEED, COUNT, question):
        for colour, name in pairs(scene.words):
            assert np.array_equal(colour.mask, name.mask)
            assert is_near(scene.image, name.mask, colour.text)
        for word in scene.words:
            assert (word.mask is None) == (word.kind == "filler" or word.text == "no")
            assert word.mask is None or word.mask.shape == scene.image.shape[:2]


def test_the_mask_has_the_outline_of_its_shape() -> None:
    """Compare how much of its box each shape covers, and whether its middle is empty."""
    covered = {"circle": 0.785, "square": 0.8, "triangle": 0.5, "cross": 0.5, "ring": 0.55}
    shares: dict[str, list[float]] = {name: [] for name in SHAPES}
    for scene in draw_caption_scenes(SEED, 60):
        for _, word in pairs(scene.words):
            rows, columns = word.mask.any(1).nonzero()[0], word.mask.any(0).nonzero()[0]
            box = word.mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            shares[word.text].append(box.mean())
            assert (not box[box.shape[0] // 2, box.shape[1] // 2]) == (word.text == "ring")
    assert {name: np.mean(values) for name, values in shares.items()} == pytest.approx(covered, abs=0.1)


def test_a_relation_is_true_and_about_both_shapes() -> None:
    relations = set()
    for scene in draw_caption_scenes(SEED, COUNT):
        shapes = [name.mask for _, name in pairs(scene.words)]
        sides = [word for word in scene.words if word.kind == "relation"]
        assert len(sides) == len(shapes) - 1
        for side, first, second in zip(sides, shapes, shapes[1:]):
            relations.add(side.text)
            assert np.array_equal(side.mask, first | second)
            axis, sign = {"left": (1, 1), "right": (1, -1), "above": (0, 1), "below": (0, -1)}[side.text]
            before, after = (mask.nonzero()[axis] for mask in (first, second)[::sign])
            assert before.max() < after.min()
    assert relations == {"left", "right", "above", "below"}


def test_a_description_is_a_function_of_the_image() -> None:
    """Check that the order follows from the colours, and that no two shapes of an image share a colour."""
    for scene in draw_caption_scenes(SEED, COUNT):
        order = [COLOUR_ORDER.index(colour.text) for colour, _ in pairs(scene.words)]
        assert order == sorted(set(order))


def test_what_is_asked_for_is_the_only_shape_at_that_side() -> None:
    for number in range(COUNT):
        scene = draw_caption_scene([SEED, number], "what", size=(128, 128), count=3)
        relation, colour, shape = re.fullmatch(r"What is (.+) the (\w+) (\w+)\?", scene.prompt).groups()
        # The same seed, count and size give the same image, whose description names all shapes.
        described = draw_caption_scene([SEED, number], size=(128, 128), count=3)
        assert np.array_equal(described.image, scene.image)
        masks = {(a.text, b.text): b.mask for a, b in pairs(described.words)}
        (answer,) = pairs(scene.words)
        axis, sign = {"left of": (1, 1), "right of": (1, -1), "above": (0, 1), "below": (0, -1)}[relation]
        beyond = []
        for name, mask in masks.items():
            steps = [sign * (np.mean(masks[colour, shape].nonzero()[k]) - np.mean(mask.nonzero()[k])) for k in (0, 1)]
            if steps[axis] > abs(steps[1 - axis]):
                beyond.append(name)
        assert beyond == [(answer[0].text, answer[1].text)]


def test_whether_there_is_a_shape() -> None:
    answers = []
    for number in range(COUNT):
        scene = draw_caption_scene([SEED, number], "whether", size=(128, 128), count=2)
        described = draw_caption_scene([SEED, number], size=(128, 128), count=2)
        names = {f"{colour.text} {name.text}": name.mask for colour, name in pairs(described.words)}
        asked = re.fullmatch(r"Is there a (.+)\?", scene.prompt).group(1)
        (word,) = scene.words
        answers.append(word.text)
        assert (word.text == "yes") == (asked in names)
        assert word.mask is None or np.array_equal(word.mask, names[asked])
    assert 0.3 < answers.count("yes") / COUNT < 0.7


def test_scenes_are_the_same_each_time() -> None:
    once, again = (draw_caption_scene(5) for _ in range(2))
    assert np.array_equal(once.image, again.image)
    assert once.answer == again.answer
    assert not np.array_equal(once.image, draw_caption_scene(6, size=once.image.shape[:2]).image)


def test_the_command_line_marks_words_that_follow_from_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scene = draw_caption_scene(SEED, count=1)
    gradcam.write_image("scene.png", scene.image)
    command = ["run", "scene.png", "--model", f"hf:{FOLDER}", "--prompt", scene.prompt, "--say", scene.answer]
    result = CliRunner().invoke(cli, [*command, "-o", "out", "--json"])
    assert result.exit_code == 0, result.output
    explained = json.loads(result.stdout)["explained"]
    assert [entry["label"] for entry in explained] == [word.text for word in scene.words]
    for entry, word in zip(explained, scene.words):
        is_grey = np.ptp(gradcam.read_image(entry["overlay"]).astype(int), axis=2).max() == 0
        assert entry.get("from_text", False) == is_grey == (word.kind == "filler")
        assert (entry["without_image"] > 0.5) == is_grey
    lines = CliRunner().invoke(cli, [*command, "-o", "out"]).stdout
    assert lines.count("(from the text)") == sum(word.kind == "filler" for word in scene.words)
