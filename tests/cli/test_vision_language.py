"""Test the commands with folders of vision-language models: prompts, words, answers and several images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradcam
from gradcam.targets import Token

pytest.importorskip("transformers")

from tests.adapters.vlm import make_image
from tests.adapters.vlm_folders import save_folder
from tests.cli.test_cli import Command, Outcome, files, folder, gradcam_command, pixels  # noqa: F401

NAMES = ("qwen2_vl", "llava_next", "smolvlm", "paligemma", "llava", "internvl")
PROMPT = ("--prompt", "what is on the table")
WORDS = ("--say", "the table is 3", "--word", "1")
MAX_LINE = 420


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in NAMES:
        save_folder(name, root)
    return root


@pytest.fixture
def images(folder: Path) -> Path:  # noqa: F811
    (folder / "photos").mkdir()
    for i, (name, size) in enumerate({"a": (48, 96), "b": (96, 64)}.items()):
        gradcam.write_image(folder / f"{name}.png", make_image(size, seed=i))
        gradcam.write_image(folder / "photos" / f"{name}.png", make_image(size, seed=i))
    return folder


def record(outcome: Outcome) -> dict[str, Any]:
    assert outcome.status == 0, outcome.err
    (line,) = outcome.out.splitlines()
    result: dict[str, Any] = json.loads(line)
    return result


@pytest.fixture
def run_vlm(gradcam_command: Command, images: Path, folders: Path) -> Command:  # noqa: F811
    """Return a function that runs a command with a model's folder."""

    def call(command: str, name: str, *arguments: str | Path) -> Outcome:
        return gradcam_command(*command.split(), *arguments, "--model", f"hf:{folders / name}", "--device", "cpu")

    return call


class TestEveryCommand:
    """Test that each command works with each family, or is refused in one clear line."""

    @pytest.mark.parametrize("name", NAMES)
    def test_commands_that_explain(self, run_vlm: Command, images: Path, name: str) -> None:
        row = record(run_vlm("run", name, "a.png", *PROMPT, *WORDS, "-o", "run", "--json"))
        (entry,) = row["explained"]
        assert (entry["word"], entry["label"], row["prompt"], row["answer"]) == (1, "table", PROMPT[1], WORDS[1])
        assert pixels(images / entry["overlay"]).shape == (48, 96, 3)
        assert run_vlm("batch", name, "photos", *PROMPT, *WORDS, "-o", "out", "--json").status == 0
        lines = [json.loads(line) for line in (images / "out/manifest.jsonl").read_text().splitlines()]
        assert {line["image"]: line["answer"] for line in lines} == {"a.png": WORDS[1], "b.png": WORDS[1]}
        assert run_vlm("compare", name, "a.png", *PROMPT, *WORDS, "--method", "gradcam,hirescam").status == 0
        assert run_vlm("page", name, "a.png", *PROMPT, "--say", "the table", "-o", "a.html").status == 0
        assert "the table" in (images / "a.html").read_text()
        assert "Verdict:" in run_vlm("check", name, "a.png", *PROMPT, *WORDS).out

    @pytest.mark.parametrize(
        ("command", "arguments"),
        [
            ("layers", ()),
            ("inspect activations", ("a.png",)),
            ("inspect gradients", ("a.png",)),
            ("inspect features", ("photos", "-o", "features.npz")),
            ("inspect trace", ("a.png",)),
            ("recommend", ("photos",)),
            ("audit", ("photos", "-o", "audit")),
        ],
    )
    @pytest.mark.parametrize("name", ["qwen2_vl", "llava"])
    def test_commands_for_classifiers(
        self, run_vlm: Command, name: str, command: str, arguments: tuple[str, ...]
    ) -> None:
        outcome = run_vlm(command, name, *arguments)
        assert outcome.status in (1, 2)
        (line,) = [line for line in outcome.err.splitlines() if line.startswith("Error")]
        assert len(line) < MAX_LINE
        assert "Traceback" not in outcome.err

    def test_evaluation_of_a_word(self, run_vlm: Command, images: Path) -> None:
        options = ("--method", "hirescam", "--metric", "complexity", "--no-controls", "-o", "study")
        outcome = run_vlm("evaluate", "qwen2_vl", "photos", *PROMPT, *WORDS, *options)
        assert outcome.status == 0, outcome.err
        assert "study/results.csv" in files(images)


class TestWords:
    """Test which words are explained."""

    def test_every_word_is_the_default(self, run_vlm: Command, folders: Path) -> None:
        rows = [
            record(run_vlm("run", "qwen2_vl", "a.png", *PROMPT, *options, "-o", "out", "--json"))
            for options in ((), ("--caption",))
        ]
        assert rows[0] == rows[1]
        model = gradcam.load_model(f"hf:{folders / 'qwen2_vl'}", device="cpu")
        target = Token(prompt=PROMPT[1], word=all)
        explanation = model.explain("a.png", target=target)
        assert rows[0]["answer"] == explanation.answer
        labels = [entry["label"] for entry in rows[0]["explained"]]
        assert labels == [instance.name for instance in explanation.instances[0]]  # type: ignore[index]
        scores = [entry["score"] for entry in rows[0]["explained"]]
        assert scores == pytest.approx(explanation.scores[0].tolist(), rel=1e-4)

    def test_the_default_prompt_and_text_as_an_alias(self, run_vlm: Command) -> None:
        options = ("--say", "the table", "-o", "out", "--json")
        assert record(run_vlm("run", "qwen2_vl", "a.png", *options))["prompt"] == "Describe the picture in a sentence."
        first = record(run_vlm("run", "qwen2_vl", "a.png", "--text", PROMPT[1], *options))
        assert first == record(run_vlm("run", "qwen2_vl", "a.png", *PROMPT, *options))

    def test_yes_or_no(self, run_vlm: Command, folders: Path) -> None:
        options = (*PROMPT, "--say", "is", "--against", "on", "-o", "out", "--json")
        (entry,) = record(run_vlm("run", "qwen2_vl", "a.png", *options))["explained"]
        model = gradcam.load_model(f"hf:{folders / 'qwen2_vl'}", device="cpu")
        logits = [
            float(model.explain("a.png", target=Token(prompt=PROMPT[1], say=word)).scores[0, 0])
            for word in ("is", "on")
        ]
        assert entry["score"] == pytest.approx(logits[0] - logits[1], abs=1e-3)
        assert entry["against"] == ["on"]

    def test_a_further_image_in_the_prompt(self, run_vlm: Command, images: Path, folders: Path) -> None:
        row = record(run_vlm("run", "qwen2_vl", "a.png", *PROMPT, *WORDS, "--with", "b.png", "-o", "out", "--json"))
        names = [
            "out/a-elementwise-gradcam-word1-table-qwen2_vl.png",
            "out/b-elementwise-gradcam-with-a-word1-table-qwen2_vl.png",
        ]
        assert [entry["overlay"] for entry in row["explained"]] == names
        assert [entry.get("on") for entry in row["explained"]] == [None, "b.png"]
        model = gradcam.load_model(f"hf:{folders / 'qwen2_vl'}", device="cpu")
        target = Token(prompt=PROMPT[1], say=WORDS[1], word=1)
        explanation = model.explain(("a.png", "b.png"), target=target)
        for i, name in enumerate(names):
            assert np.abs(pixels(images / name).astype(int) - explanation.overlay(i)).max() <= 2

    def test_a_batch_with_a_further_image(self, run_vlm: Command, images: Path) -> None:
        shutil.copy(images / "b.png", images / "reference.png")
        outcome = run_vlm("batch", "qwen2_vl", "photos", *PROMPT, *WORDS, "--with", "reference.png", "-o", "out")
        assert outcome.status == 0, outcome.err
        lines = [json.loads(line) for line in (images / "out/manifest.jsonl").read_text().splitlines()]
        assert [[entry.get("on") for entry in line["explained"]] for line in lines] == [[None, "reference.png"]] * 2
        run = json.loads((images / "out/run.json").read_text())
        assert run["settings"]["with"][0]["file"] == "reference.png"

    def test_a_page_shows_the_sentence_and_its_command(self, run_vlm: Command, images: Path) -> None:
        assert run_vlm("page", "qwen2_vl", "a.png", *PROMPT, "--say", "the table", "-o", "a.html").status == 0
        page = (images / "a.html").read_text()
        for part in ("Prompt: what is on the table", "--prompt", "--say", "Token(word=1, say=\\u0027the table\\u0027)"):
            assert part in page or json.dumps(part)[1:-1] in page, part

    def test_the_command_of_a_page_gives_the_same_heatmap(self, run_vlm: Command, images: Path) -> None:
        options = (*PROMPT, "--say", "the table", "--with", "b.png")
        assert run_vlm("page", "qwen2_vl", "a.png", *options, "-o", "a.html").status == 0
        page = (images / "a.html").read_text()
        assert '"--with","b.png"' in page

    def test_a_run_with_another_prompt_or_answer_is_not_resumed(self, run_vlm: Command) -> None:
        options = ("photos", "-o", "out")
        assert run_vlm("batch", "qwen2_vl", *options, *PROMPT, *WORDS).status == 0
        assert run_vlm("batch", "qwen2_vl", *options, *PROMPT, *WORDS, "--resume").status == 0
        changes = {
            "prompt: what is on the table → what": ("--prompt", "what", *WORDS),
            "say: the table is 3 → the table": (*PROMPT, "--say", "the table", "--word", "1"),
            "word": (*PROMPT, "--say", "the table is 3", "--word", "2"),
        }
        for message, typed in changes.items():
            outcome = run_vlm("batch", "qwen2_vl", *options, *typed, "--resume")
            outcome.check_error(2 if outcome.status == 2 else 1, "the earlier run had other settings", message)


class TestWrongUse:
    """Test that each wrong use gives one clear line."""

    @pytest.mark.parametrize(
        ("typed", "message"),
        [
            (("--say", ""), "is empty"),
            (("--prompt", " "), "is empty"),
            ((*WORDS, "--with", "nowhere.png"), "'nowhere.png' does not exist"),
            ((*WORDS, "--with", "b.png", "--with", "b.png"), "--with has the same image twice"),
            (
                (*PROMPT, "--say", "the table", "--word", "7"),
                "There is no word 7. The caption has 2 word(s), counted from 0",
            ),
            ((*PROMPT, "--say", "unheard"), "tokenizer has no tokens for a part of 'unheard'"),
            ((*PROMPT, "--text", "what"), "A captioner takes one --prompt, but 2 were given"),
            ((*PROMPT, "--against", "on", "--against", "is"), "A captioner takes one --against, but 2 were given"),
            ((*PROMPT, "--box", "0"), "--box and --prompt each choose what is explained"),
            ((*PROMPT, "--method", "lens", "--method", "hirescam"), "different default layers: name a layer"),
            ((*PROMPT, "--size", "28"), "own processor prepares the images"),
        ],
    )
    def test_of_a_vision_language_model(self, run_vlm: Command, typed: tuple[str, ...], message: str) -> None:
        outcome = run_vlm("run", "qwen2_vl", "a.png", *typed)
        outcome.check_error(1 if outcome.status == 1 else 2, message)
        assert "Traceback" not in outcome.err

    def test_of_other_models(self, gradcam_command: Command, images: Path) -> None:  # noqa: F811
        outcome = gradcam_command("run", "a.png", *PROMPT)
        outcome.check_error(2, "--prompt is for captioning, but efficientnet_lite0 is for classification")
        outcome = gradcam_command("run", "a.png", "--with", "b.png")
        outcome.check_error(2, "--with is for captioning, but")

    def test_folders_that_lack_a_part(self, run_vlm: Command, folders: Path) -> None:
        for name, removed, message in (
            ("plain", ("processor_config.json", "preprocessor_config.json"), "has no processor of images and text"),
            ("mute", ("tokenizer.json",), "has no processor of images and text"),
        ):
            shutil.copytree(folders / "qwen2_vl", folders / name)
            for file in removed:
                (folders / name / file).unlink(missing_ok=True)
            outcome = run_vlm("run", name, "a.png", *PROMPT)
            outcome.check_error(2, message)
        shutil.copytree(folders / "paligemma", folders / "foreign")
        for file in ("processor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(folders / "qwen2_vl" / file, folders / "foreign" / file)
        outcome = run_vlm("run", "foreign", "a.png", *PROMPT)
        assert outcome.status in (1, 2)
        assert "processor" in outcome.err
        assert "Traceback" not in outcome.err
