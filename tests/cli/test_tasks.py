"""Test boxes, masks, sentences, similarity, words and keypoints on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import gradcam
from gradcam import targets
from gradcam.cli._settings import OPTIONS_BY_TASK
from gradcam.cli._terminal import format_report
from gradcam.options import TASKS
from gradcam.storage.records import Explained, ImageOutcome, Prediction, Record
from tests.cli.test_cli import Command, Outcome, files, folder, gradcam_command, pixels, records, run

__all__ = ["folder", "gradcam_command", "run"]  # fixtures

MODELS = """
import torch
from torch import nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator


class Backbone(nn.Module):
    out_channels = 4

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, 8, 1)

    def forward(self, images):
        return {"0": self.convolution(images).relu()}


def detector(threshold=0.0):
    torch.manual_seed(3)
    anchors = AnchorGenerator(((24, 40),), ((1.0,),))
    model = RetinaNet(Backbone(), 3, anchor_generator=anchors, min_size=64, max_size=96, score_thresh=threshold,
                      nms_thresh=0.3, detections_per_img=12)
    torch.nn.init.normal_(model.head.classification_head.cls_logits.weight, std=1.0)
    return model


def blind():
    return detector(threshold=0.9)


class Colours(nn.Module):  # the class of a pixel is the strongest of its colours
    def __init__(self, stride=4):
        super().__init__()
        self.blocks = nn.Conv2d(3, 3, stride, stride, bias=False)
        self.head = nn.Conv2d(3, 3, 1, bias=False)
        with torch.no_grad():
            self.blocks.weight.zero_()
            for colour in range(3):
                self.blocks.weight[colour, colour] = 1 / stride**2
            self.head.weight.copy_(4 * torch.eye(3)[:, :, None, None])

    def forward(self, images):
        return self.head(self.blocks(images).relu())


class Segmenter(Colours):
    def forward(self, images):
        return nn.functional.interpolate(super().forward(images), images.shape[2:], mode="nearest")


def segmenter():
    return Segmenter()


WORDS = ("red", "green", "blue")


class Towers(nn.Module):  # a sentence is the colours that it names; a picture is its mean colour
    def __init__(self):
        super().__init__()
        self.visual = Colours(8)
        self.embedding = nn.Embedding.from_pretrained(torch.eye(3))

    def tokenizer(self, sentences):
        return torch.tensor([[WORDS.index(word) for word in it.split() if word in WORDS][:1] or [0] for it in sentences])

    def encode_image(self, images):
        return self.visual(images).mean((2, 3))

    def encode_text(self, tokens):
        return self.embedding(tokens).mean(1)

    def forward(self, images, tokens):
        return self.encode_image(images), self.encode_text(tokens)


def towers():
    return Towers()


def classes():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def captioner():
    from transformers import GitConfig, GitForCausalLM

    torch.manual_seed(0)
    small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    vision = small | dict(image_size=32, patch_size=8)
    return GitForCausalLM(GitConfig(vision_config=vision, vocab_size=30, bos_token_id=1, eos_token_id=29, **small))


def best(found):
    return found[0]["scores"][:1]
"""
RED, GREEN, BLUE = (220, 20, 20), (20, 220, 20), (20, 20, 220)


@pytest.fixture
def models_file(folder: Path) -> str:
    (folder.parent / "mine.py").write_text(MODELS)
    (folder.parent / "labels.txt").write_text("background\nperson\ndog\n")
    (folder.parent / "colours.txt").write_text("red\ngreen\nblue\n")
    return "../mine.py"


@pytest.fixture
def street(folder: Path) -> Path:
    """Return an image of seeded noise, 96 x 64 pixels."""
    return write_noise(folder.parent / "street.png", 0)


def write_noise(path: Path, seed: int, size: tuple[int, int] = (64, 96)) -> Path:
    path.parent.mkdir(exist_ok=True)
    values = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(values).save(path)
    return path


def write_colours(path: Path, *colours: tuple[int, int, int]) -> Path:
    """Write a 64 x 32 image with vertical stripes of equal width in these colours."""
    path.parent.mkdir(exist_ok=True)
    values = np.repeat(np.repeat(np.array([colours], np.uint8), 32, 0), 64 // len(colours), 1)
    Image.fromarray(values).save(path)
    return path


@pytest.fixture
def flag(folder: Path) -> Path:
    return write_colours(folder.parent / "flag.png", RED, GREEN, RED, RED)


def errors(outcome: Outcome) -> list[str]:
    """Return the lines on standard error, without notes about assumed preprocessing."""
    return [line for line in outcome.err.splitlines() if not line.startswith("Note: ")]


def record(outcome: Outcome) -> dict[str, Any]:
    assert (outcome.status, errors(outcome)) == (0, []), outcome.err
    (row,) = records(outcome)
    return row


def explained(outcome: Outcome) -> list[dict[str, Any]]:
    return record(outcome)["explained"]


def detect(models_file: str, path: Path) -> dict[str, torch.Tensor]:
    """Return the detections from a plain call of the model."""
    space: dict[str, Any] = {}
    exec((Path(models_file)).read_text(), space)
    image = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) / 255
    with torch.no_grad(), torch.random.fork_rng():
        (detections,) = space["detector"]().eval()([image])
    return detections


DETECTOR = ("--model", "../mine.py:detector", "--labels", "../labels.txt")


# Boxes


def test_boxes_are_printed_and_the_best_explained(run: Command, folder: Path, street: Path, models_file: str) -> None:
    outcome = run(street, *DETECTOR)
    assert (outcome.status, errors(outcome)) == (0, [])
    title, _, *lines = outcome.out.splitlines()
    assert re.fullmatch(r"street\.png   96 x 64   ../mine.py:detector on cpu   detection   \d\.\d s", title)
    detections = detect(models_file, street)
    names = ("background", "person", "dog")
    for number in range(10):
        label, share = names[int(detections["labels"][number])], float(detections["scores"][number])
        assert re.match(
            rf"  {number}   {label} +{share * 100:.0f} %" if share >= 0.01 else f"  {number}   {label}", lines[number]
        )
    assert lines[10] == "  and 2 more (see --json)"
    label = names[int(detections["labels"][0])]
    assert lines[12] == f"  box 0, {label} at backbone (8 x 12)  →  street-hirescam-mine.py_detector.png"
    assert lines[14] == "  The model sees the whole image."
    assert files(folder) == ["street-hirescam-mine.py_detector.png"]


def test_the_record_of_a_box(run: Command, folder: Path, street: Path, models_file: str) -> None:
    detections = detect(models_file, street)
    row = record(run(street, *DETECTOR, "--json"))
    assert len(row["predictions"]) == len(detections["scores"]) == 12
    for number, item in enumerate(row["predictions"]):
        assert (item["number"], item["index"]) == (number, int(detections["labels"][number]))
        assert item["probability"] == pytest.approx(float(detections["scores"][number]), rel=1e-5)
        assert item["box"] == pytest.approx(detections["boxes"][number].tolist(), abs=0.051)
    (entry,) = row["explained"]
    first = row["predictions"][0]
    assert {key: entry[key] for key in ("number", "index", "label", "box", "method", "layer")} == {
        **{key: first[key] for key in ("number", "index", "label", "box")},
        "method": "hirescam",
        "layer": "backbone",
    }
    assert entry["score"] == pytest.approx(first["probability"])
    assert {"edge", "missed", "mask", "text", "like", "word", "keypoint"}.isdisjoint(entry)
    assert Record.from_json(json.dumps(row)).to_json() == json.dumps(row)


def test_several_boxes_have_files_of_their_own(run: Command, folder: Path, street: Path, models_file: str) -> None:
    names = ("background", "person", "dog")
    labels = [names[int(item)] for item in detect(models_file, street)["labels"]]
    entries = explained(run(street, *DETECTOR, "--box", 0, "--box", "3", "--json"))
    assert [(entry["number"], entry["label"]) for entry in entries] == [(0, labels[0]), (3, labels[3])]
    assert files(folder) == sorted(
        f"street-hirescam-box{number}-{labels[number]}-mine.py_detector.png" for number in (0, 3)
    )
    assert len(explained(run(street, *DETECTOR, "--box", "all", "--json", "-o", "all"))) == 12
    assert len(files(folder / "all")) == 12


def test_maps_are_those_of_python(run: Command, folder: Path, street: Path, models_file: str) -> None:
    assert run(street, *DETECTOR, "--box", 2, "--save", "overlay,map", "-q").status == 0
    detector = gradcam.load_detector(f"{models_file}:detector", labels="../labels.txt", device="cpu")
    explanation = detector.explain(street, target=targets.Box(2))
    stem = f"street-hirescam-box2-{explanation.instances[0][0].name}-mine.py_detector"
    np.testing.assert_allclose(np.load(f"{stem}.npy"), explanation.maps[0, 0].numpy(), rtol=1e-5)
    np.testing.assert_array_equal(pixels(folder / f"{stem}.png"), explanation.overlay())


def test_edges_and_what_was_missed(run: Command, folder: Path, street: Path, models_file: str) -> None:
    # Other boxes touch the left image edge.
    inside = next(k for k, x0 in enumerate(detect(models_file, street)["boxes"][:, 0]) if x0 > 1)
    (entry,) = explained(run(street, *DETECTOR, "--box", inside, "--edge", "left", "--json"))
    assert (entry["number"], entry["edge"]) == (inside, "left")
    assert entry["score"] == pytest.approx(entry["box"][0], abs=0.051)
    (entry,) = explained(run(street, *DETECTOR, "--missed", "40,10,80,50.5", "--class", "dog", "--json"))
    assert (entry["missed"], entry["box"], entry["index"], entry["label"]) == (True, [40, 10, 80, 50.5], 2, "dog")
    assert "number" not in entry
    outcome = run(street, *DETECTOR, "--missed", "40,10,80,50", "--missed", "0,0,20,20", "--class", "dog", "-o", "two")
    assert files(folder / "two") == [
        f"street-hirescam-missed-{box}-dog-mine.py_detector.png" for box in ("0_0_20_20", "40_10_80_50")
    ]
    assert "  missed dog at 40,10,80,50 at backbone (8 x 12)" in outcome.out


def test_the_surest_box_of_a_class(run: Command, street: Path, models_file: str) -> None:
    labels = detect(models_file, street)["labels"].tolist()
    (entry,) = explained(run(street, *DETECTOR, "--class", "dog", "--json"))
    assert (entry["number"], entry["label"]) == (labels.index(2), "dog")


def test_methods_side_by_side_on_a_box(gradcam_command: Command, folder: Path, street: Path, models_file: str) -> None:
    outcome = gradcam_command("compare", street, *DETECTOR, "--device", "cpu", "--box", 1, "--json")
    entries = explained(outcome)
    assert [entry["method"] for entry in entries] == ["gradcam", "gradcam-pp", "hirescam", "layercam", "eigencam"]
    assert {entry["number"] for entry in entries} == {1}
    assert {entry["overlay"] for entry in entries} == {"street-compare-mine.py_detector.png"}
    assert files(folder) == ["street-compare-mine.py_detector.png"]


def test_a_function_of_the_output(run: Command, street: Path, models_file: str) -> None:
    row = record(run(street, *DETECTOR, "--target", "../mine.py:best", "--json"))
    (entry,) = row["explained"]
    assert (entry["index"], entry["label"]) == (None, "best")
    assert entry["score"] == pytest.approx(float(detect(models_file, street)["scores"][0]), rel=1e-5)


def test_without_boxes_the_error_names_the_best_candidates(run: Command, street: Path, models_file: str) -> None:
    outcome = run(street, "--model", "../mine.py:blind", "--labels", "../labels.txt")
    assert (outcome.status, outcome.out) == (1, "")
    assert re.match(
        rf"{re.escape(str(street))}: No box was found .* Best candidates: (class \d|person|dog|background) 0\.",
        outcome.err,
    )
    assert "--missed" in outcome.err
    assert len(errors(outcome)) == 1
    run(street, "--model", "../mine.py:detector", "--box", 99).check_error(
        1, "There is no box 99 in the image: the numbers"
    )


# Masks


PREPROCESSING = ("--mean", "0,0,0", "--std", "1,1,1")
SEGMENTER = ("--model", "../mine.py:segmenter", "--labels", "../colours.txt", "--size", "32", *PREPROCESSING)


def test_classes_are_printed_with_their_share(run: Command, folder: Path, flag: Path, models_file: str) -> None:
    outcome = run(flag, *SEGMENTER)
    assert (outcome.status, errors(outcome)) == (0, [])
    lines = outcome.out.splitlines()
    assert "   segmentation   " in lines[0]
    assert lines[2:4] == [
        "  0   red      75 % of the image   ██████████████████",
        "  1   green    25 % of the image   ██████",
    ]
    assert re.fullmatch(r"  mask of red at \w+ \(8 x 16\)  →  flag-hirescam-mine\.py_segmenter\.png", lines[5])


def test_masks_by_class_point_box_and_file(run: Command, folder: Path, flag: Path, models_file: str) -> None:
    def look(*arguments: object) -> dict[str, Any]:
        (entry,) = explained(run(flag, *SEGMENTER, *arguments, "--json"))
        return {key: entry[key] for key in ("label", "mask", "box")}

    assert look("--class", "green") == {"label": "green", "mask": "predicted", "box": [16, 0, 32, 32]}
    assert look("--mask", "40,5") == {"label": "red", "mask": "40,5", "box": [32, 0, 64, 32]}
    assert look("--mask", "4,4,12,16", "--class", "red") == {"label": "red", "mask": "4,4,12,16", "box": [4, 4, 12, 16]}
    mask = np.zeros((32, 64), np.uint8)
    mask[8:16, 20:24] = 255
    Image.fromarray(mask).save("mask.png")
    assert look("--mask", "mask.png") == {"label": "green", "mask": "mask.png", "box": [20, 8, 24, 16]}


def test_a_point_outside_is_told_in_pixels_of_the_picture(run: Command, flag: Path, models_file: str) -> None:
    outcome = run(flag, *SEGMENTER[: -len(PREPROCESSING)], "--size", "96", "--mask", "70,5")
    assert outcome.status == 1
    assert "The point (70.0, 5.0) is outside the image, which is 64 pixels wide and 32 high." in outcome.err


def test_several_classes_have_masks_of_their_own(run: Command, folder: Path, flag: Path, models_file: str) -> None:
    entries = explained(run(flag, *SEGMENTER, "--class", "green", "--class", "red", "--json"))
    assert [entry["label"] for entry in entries] == ["green", "red"]
    assert files(folder) == [f"flag-hirescam-mask-{name}-mine.py_segmenter.png" for name in ("green", "red")]


def test_a_class_without_a_mask_is_an_error(run: Command, flag: Path, models_file: str) -> None:
    outcome = run(flag, *SEGMENTER, "--class", "blue")
    assert outcome.status == 1
    assert re.search("No pixel is predicted as (blue|class 2)", outcome.err)
    assert len(errors(outcome)) == 1


# Sentences and similarity


MATCHER = ("--model", "../mine.py:towers", "--task", "matching", "--size", "32x64", *PREPROCESSING)


def test_each_sentence_is_printed_with_its_cosine(run: Command, folder: Path, flag: Path, models_file: str) -> None:
    outcome = run(flag, *MATCHER, "--text", "a red flag", "--text", "green")
    assert (outcome.status, errors(outcome)) == (0, [])
    lines = outcome.out.splitlines()
    assert "   matching   " in lines[0]
    entries = explained(run(flag, *MATCHER, "--text", "a red flag", "--text", "green", "--json"))
    for line, entry in zip(lines[2:4], entries):
        assert line.startswith(f"  {entry['text']:<10}   cosine {entry['score']:.3f} at ")
    assert entries[0]["score"] > entries[1]["score"]
    assert [(entry["text"], entry["label"], entry["index"]) for entry in entries] == [
        ("a red flag", "a red flag", None),
        ("green", "green", None),
    ]
    assert sorted(files(folder)) == [
        f"flag-{entries[0]['method']}-text-{name}-mine.py_towers.png" for name in ("a_red_flag", "green")
    ]


def test_a_cosine_is_that_of_the_embeddings(run: Command, flag: Path, models_file: str) -> None:
    (entry,) = explained(run(flag, *MATCHER, "--text", "red", "--against", "green", "--json"))
    assert entry["against"] == ["green"]
    embedding = pixels(flag).astype(np.float64).mean((0, 1))
    red, green = embedding[:2] / np.linalg.norm(embedding)
    assert entry["score"] == pytest.approx(red - green, rel=1e-5)


def test_a_likeness_is_shown_on_both_pictures(run: Command, folder: Path, flag: Path, models_file: str) -> None:
    colours = write_colours(folder.parent / "other.png", GREEN, RED)
    entries = explained(run(flag, *MATCHER, "--like", colours, "--json"))
    assert [(entry["like"], entry.get("on")) for entry in entries] == [
        (str(colours), None),
        (str(colours), "reference"),
    ]
    method = entries[0]["method"]
    names = [f"{name}-mine.py_towers.png" for name in (f"flag-{method}-like-other", f"other-{method}-like-flag")]
    assert [entry["overlay"] for entry in entries] == names == files(folder)
    red = [np.abs(pixels(folder / name).astype(int) - pixels(path)).sum() for name, path in zip(names, (flag, colours))]
    assert all(red), "a map lies on each"
    outcome = run(flag, *MATCHER, "--like", colours)
    assert "  like other.png" in outcome.out
    assert "  in other.png" in outcome.out


# Words


def test_words_are_numbered_and_explained(run: Command, folder: Path, street: Path, models_file: str) -> None:
    pytest.importorskip("transformers")
    arguments = ("--model", "../mine.py:captioner", "--size", "32x32", "--mean", "0,0,0", "--std", "1,1,1", "--json")
    row = record(run(street, *arguments, "--caption"))
    words = row["predictions"]
    assert [word["number"] for word in words] == list(range(len(words)))
    assert [item["word"] for item in row["explained"]] == list(range(len(words)))
    (entry,) = explained(run(street, *arguments, "--word", 1, "-o", "one"))
    assert (entry["word"], entry["index"]) == (1, words[1]["index"])


# Keypoints


def test_keypoints_by_their_numbers(run: Command, folder: Path, flag: Path, models_file: str) -> None:
    """Request a keypoint of a segmentation network: any output of shape (N,P,h,w) can be read as keypoints."""
    arguments = ("--model", "../mine.py:segmenter", "--size", "32", *PREPROCESSING, "--json")
    (entry,) = explained(run(flag, *arguments, "--keypoint", 1))
    values = pixels(flag).astype(np.float64)[..., 1] / 255
    assert entry["score"] == pytest.approx(4 * values.max(), rel=1e-5), "the head makes four of it"
    assert (entry["keypoint"], entry["point"]) == (1, [16.5, 0.5]), "the first pixel of the green quarter"
    entries = explained(run(flag, *arguments, "--keypoint", "0,2", "--axis", "x", "-o", "two"))
    assert [(entry["keypoint"], entry["axis"]) for entry in entries] == [(0, "x"), (2, "x")]
    assert files(folder / "two") == [f"flag-hirescam-keypoint{number}-x-mine.py_segmenter.png" for number in (0, 2)]
    assert "one box at a time" in run(flag, *arguments, "--keypoint", "0", "--box", "all").err


# Batches


def batch(command: Command, *arguments: object) -> Outcome:
    return command("batch", "--device", "cpu", *arguments)


@pytest.fixture
def photos(folder: Path) -> Path:
    for seed, name in enumerate(("a.png", "b.png")):
        write_noise(folder / "photos" / name, seed)
    write_noise(folder / "photos" / "c.png", 7, (48, 64))
    return folder / "photos"


def test_all_classes_are_the_top_classes(gradcam_command: Command, photos: Path, models_file: str) -> None:
    model = ("--model", "../mine.py:classes", *PREPROCESSING, "--size", "32", "--device", "cpu", "--json")
    entries = explained(gradcam_command("run", photos / "a.png", *model, "--top-k", 3))
    assert {entry["index"] for entry in entries} == {0, 1, 2}
    message = "--top-k is 4, but this model has 3 classes"
    gradcam_command("run", photos / "a.png", *model, "--top-k", 4).check_error(2, message)


def test_a_batch_of_boxes_resumes(gradcam_command: Command, folder: Path, photos: Path, models_file: str) -> None:
    arguments = (photos, "-o", "out", *DETECTOR, "--box", "0,1", "--report", "--format", "png")
    assert batch(gradcam_command, *arguments).status == 0
    lines = Path("out/manifest.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [[item["number"] for item in row["explained"]] for row in rows] == [[0, 1]] * 3
    settings = json.loads(Path("out/run.json").read_text())["settings"]
    assert (settings["task"], settings["box"]) == ("detection", [0, 1])
    assert {"top_k", "score"}.isdisjoint(settings)
    alone = record(gradcam_command("run", photos / "c.png", *DETECTOR, "--device", "cpu", "--json", "-o", "alone"))
    assert alone["predictions"] == rows[2]["predictions"]
    data = json.loads(re.search(r'id="data">(.*?)</script>', Path("out/index.html").read_text(), re.S)[1])
    assert {label for _, label in data["classes"]} <= {"background", "person", "dog"}
    Path("out/manifest.jsonl").write_text(lines[0] + "\n")
    assert batch(gradcam_command, *arguments, "--resume").status == 0
    assert Path("out/manifest.jsonl").read_text().splitlines() == lines
    batch(gradcam_command, *arguments[:-4], "0,2", "--report", "--format", "png", "--resume").check_error(2, "box")


def test_an_image_without_boxes_fails(gradcam_command: Command, folder: Path, photos: Path, models_file: str) -> None:
    values = detect(models_file, photos / "a.png")["scores"], detect(models_file, photos / "b.png")["scores"]
    between = (float(values[0][0]) + float(values[1][0])) / 2
    names = ["a", "b"] if values[0][0] > values[1][0] else ["b", "a"]
    for boxes in ("0", "all"):
        outcome = batch(
            gradcam_command, photos / "a.png", photos / "b.png", "-o", f"out-{boxes}", *DETECTOR, "--box", boxes,
            "--threshold", between, "--batch-size", 2,
        )  # fmt: skip
        rows = {
            item["image"][0]: item
            for item in map(json.loads, Path(f"out-{boxes}/manifest.jsonl").read_text().splitlines())
        }
        assert outcome.status == 1
        assert [rows[name]["status"] for name in names] == ["ok", "failed"]
        assert "No box was found" in rows[names[1]]["error"]
        assert "Best candidates:" in rows[names[1]]["error"]


def test_a_batch_of_masks_sentences_and_likenesses(gradcam_command: Command, folder: Path, models_file: str) -> None:
    for name, colours in {"a": (RED, GREEN), "b": (BLUE, GREEN, GREEN, GREEN)}.items():
        write_colours(folder / "photos" / f"{name}.png", *colours)
    assert batch(gradcam_command, "photos", "-o", "masks", *SEGMENTER, "--class", "green").status == 0
    rows = [json.loads(line) for line in Path("masks/manifest.jsonl").read_text().splitlines()]
    assert [item["explained"][0]["box"] for item in rows] == [[32, 0, 64, 32], [16, 0, 64, 32]]
    assert batch(gradcam_command, "photos", "-o", "texts", *MATCHER, "--text", "red", "--text", "blue").status == 0
    rows = [json.loads(line) for line in Path("texts/manifest.jsonl").read_text().splitlines()]
    scores = [[item["score"] for item in row["explained"]] for row in rows]
    assert scores[0][0] > scores[0][1]
    assert scores[1][1] > scores[1][0]
    reference = write_colours(folder / "other.png", GREEN)
    assert batch(gradcam_command, "photos", "-o", "like", *MATCHER, "--like", reference, "--report").status == 0
    rows = [json.loads(line) for line in Path("like/manifest.jsonl").read_text().splitlines()]
    method = rows[0]["explained"][0]["method"]
    names = [f"{name}-{method}-like-other{end}.jpg" for name in "ab" for end in ("", "-reference")]
    assert [row["overlay"] for item in rows for row in item["explained"]] == names
    settings = json.loads(Path("like/run.json").read_text())["settings"]
    assert settings["like"]["file"] == "other.png"
    write_colours(reference, RED)
    batch(gradcam_command, "photos", "-o", "like", *MATCHER, "--like", reference, "--report", "--resume").check_error(
        2, "like"
    )


def test_a_reference_is_not_overwritten(gradcam_command: Command, folder: Path, flag: Path, models_file: str) -> None:
    write_colours(folder / "photos" / "a.png", RED)
    colours = write_colours(folder / "out" / "a-gradcam-like-a.jpg", RED)
    assert "a-gradcam-like-a.jpg" in str(colours)
    batch(gradcam_command, "photos", "-o", "out", *MATCHER, "--like", colours).check_error(2, "a-gradcam-like-a.jpg")
    overwriting = gradcam_command("run", flag, *MATCHER, "--device", "cpu", "--like", colours, "-o", colours)
    assert overwriting.status == 2


def test_lists_of_classes_need_boxes_or_masks(gradcam_command: Command, folder: Path, models_file: str) -> None:
    for name in "ab":
        write_colours(folder / "photos" / f"{name}.png", RED, GREEN)
    Path("list.csv").write_text("image,class\nphotos/a.png,green\nphotos/b.png,red\n")
    assert batch(gradcam_command, "list.csv", "-o", "out", *SEGMENTER).status == 0
    rows = [json.loads(line) for line in Path("out/manifest.jsonl").read_text().splitlines()]
    assert [item["explained"][0]["label"] for item in rows] == ["green", "red"]
    batch(
        gradcam_command, "list.csv", "-o", "texts", *MATCHER, "--labels", "../colours.txt", "--text", "red"
    ).check_error(2, "The list names the classes to explain, but --text does not explain a class")


def test_files_from_python(folder: Path, photos: Path, models_file: str) -> None:
    detector = gradcam.load_detector(f"{models_file}:detector", labels="../labels.txt", device="cpu")
    results = list(gradcam.explain_files(photos, detector, target=targets.Box([0, 1])))
    assert [item.error for item in results] == [None] * 3
    for entry in results:
        (explanation,) = entry.explanations.values()
        assert [instance.number for instance in explanation.instances[0]] == [0, 1]
        assert len(entry.predictions) == 12
    assert results[0].predictions[0].box is not None


# Contradictory arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--box", "1", "--missed", "1,2,3,4"), "--box and --missed each choose what is explained"),
        (("--text", "a dog", "--like", "STREET"), "--text and --like each choose what is explained"),
        (("--mask", "1,2", "--box", "1"), "--box and --mask each choose what is explained"),
        (("--box", "0", "--top-k", "2"), "--box and --top-k each choose what is explained"),
        (("--box", "0", "--target", "../mine.py:best"), "--box and --target each choose what is explained"),
        (("--edge", "left", "--missed", "1,2,3,4"), "--edge and --missed each choose what is explained"),
        (("--box", "first"), "'first' is not a whole number"),
        (("--box", "all,1"), "'all' already includes every number"),
        (("--missed", "40,60,20,400"), "'40,60,20,400' is not a box: expected left, top, right and bottom"),
        (("--mask", "no.png"), "'no.png' does not exist"),
        (("--mask", "1,2,3"), "'1,2,3' is not a box"),
        (("--text", "  "), "The sentence is empty"),
        (("--like", "no.jpg"), "'no.jpg' does not exist"),
        (("--edge", "middle"), "'middle'"),
        (("--against", "1"), "--against needs --score contrast"),
    ],
)  # fmt: skip
def test_contradictions_are_found_before_a_model_is_loaded(
    run: Command, street: Path, models_file: str, arguments: tuple[str, ...], message: str
) -> None:
    outcome = run(
        street, "--model", "nowhere.py:f", *(argument.replace("STREET", str(street)) for argument in arguments)
    )
    outcome.check_error(2, message)
    assert len(outcome.err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("model", "typed", "message"),
    [
        (
            "classes",
            ("--text", "a dog"),
            "--text is for matching and text-prompted detectors, but ../mine.py:classes is for "
            "classification. You can use --class, --top-k, --score, --against and --target.",
        ),
        ("classes", ("--box", "0"), "--box is for detection and pose, but ../mine.py:classes is for classification"),
        ("classes", ("--word", "0"), "--word is for captioning, but"),
        ("classes", ("--threshold", "0.5"), "--threshold is for detection, but"),
        ("detector", ("--text", "a dog"), "--text is for matching and text-prompted detectors, but"),
        ("detector", ("--top-k", "2"), "--top-k is for classification, but ../mine.py:detector is for detection"),
        ("detector", ("--score", "probability"), "--score is for classification, but"),
        ("detector", ("--fit", "whole"), "--fit is for classification, but"),
        ("detector", ("--class", "0", "--class", "1"), "give only one --class"),
        ("segmenter", ("--box", "0"), "--box is for detection and pose, but ../mine.py:segmenter is for segmentation"),
        ("towers", ("--task", "matching", "--box", "0", "--text", "a"), "--box is for detection and pose, but"),
        ("towers", ("--task", "matching"), "add --text SENTENCE or --like FILE"),
        ("towers", ("--task", "matching", "--text", "a", "--class", "1"), "--class is for classification"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("models_file")
def test_options_of_another_task(run: Command, street: Path, model: str, typed: tuple[str, ...], message: str) -> None:
    outcome = run(street, "--model", f"../mine.py:{model}", "--labels", "../labels.txt", *typed)
    outcome.check_error(2, message)
    assert len(errors(outcome)) <= 2
    assert outcome.out == ""


def test_one_file_is_not_for_several_results(run: Command, street: Path, models_file: str) -> None:
    for boxes in ("0,1", "all"):
        run(street, *DETECTOR, "--box", boxes, "-o", "one.png").check_error(2, "there are several results")
    assert run(street, *DETECTOR, "--box", "4", "-o", "one.png", "-q").status == 0


# Evaluation


def test_a_box_differs_from_the_others(gradcam_command: Command, folder: Path, street: Path, models_file: str) -> None:
    outcome = gradcam_command("check", street, *DETECTOR, "--device", "cpu", "--box", 2, "--json")
    row = record(outcome)
    detections = detect(models_file, street)
    assert {key: row[key] for key in ("number", "index", "method", "layer")} == {
        "number": 2, "index": int(detections["labels"][2]), "method": "hirescam", "layer": "backbone"
    }  # fmt: skip
    assert row["box"] == pytest.approx(detections["boxes"][2].tolist(), abs=0.051)
    assert row["probability"] == pytest.approx(float(detections["scores"][2]), rel=1e-4)
    assert row["panel"] == "street-hirescam-check-mine.py_detector.png"
    assert files(folder) == [row["panel"]]
    out = gradcam_command("check", street, *DETECTOR, "--device", "cpu", "--box", 2).out
    assert out.splitlines()[1].startswith(f"  box 2, {row['label']}, ")
    assert "the heatmap of the most probable alternative, box 0, dog, is " in " ".join(out.split())


def test_a_sentence_is_checked_against_the_others(gradcam_command: Command, flag: Path, models_file: str) -> None:
    towers = (
        "--model", "../mine.py:towers", "--task", "matching", "--size", "32x64", *PREPROCESSING, "--device", "cpu"
    )  # fmt: skip
    row = record(
        gradcam_command(
            "check", flag, *towers, "--text", "a green", "--text", "a red", "--json", "--method", "hirescam"
        )
    )
    assert (row["text"], row["label"], row["index"]) == ("a green", "a green", None)
    reason = next(item["reason"] for item in row["tests"] if item["name"] == "classes")
    assert reason.startswith("The rank correlation with the heatmap of the most probable alternative, a red, is -0.")


@pytest.mark.parametrize(
    ("command", "typed", "message"),
    [
        ("check", ("--box", "0", "--text", "dog"), "--text is for matching and text-prompted detectors"),
        ("check", ("--edge", "left"), "No such option"),
        ("check", ("--box", "40"), "There is no box 40 in the image: the numbers are 0 to 11."),
        ("evaluate", ("--word", "0"), "--word is for captioning, but ../mine.py:detector is for detection"),
        ("recommend", (), "../mine.py:detector is a model for detection, not a classifier"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("models_file")
def test_wrong_study(
    gradcam_command: Command, street: Path, command: str, typed: tuple[str, ...], message: str
) -> None:
    outcome = gradcam_command(command, street, *DETECTOR, "--device", "cpu", *typed)
    assert outcome.status in (1, 2)
    assert message in outcome.err
    assert len(errors(outcome)) <= 2


def test_methods_on_annotated_boxes(gradcam_command: Command, folder: Path, street: Path, models_file: str) -> None:
    detections = detect(models_file, street)
    labels = detections["labels"].tolist()
    # Not the class of the highest-scoring box.
    number = next(k for k, label in enumerate(labels) if label != labels[0])
    index, name = labels[number], ("background", "person", "dog")[labels[number]]
    box = ",".join(f"{side:.0f}" for side in detections["boxes"][number].tolist())
    (folder / "boxes.csv").write_text(f"image,class,left,top,right,bottom\nstreet.png,{name},{box}\n")
    common = (
        street, *DETECTOR, "--device", "cpu", "--method", "hirescam", "--metric", "energy-pointing", "--no-controls"
    )  # fmt: skip
    outcome = gradcam_command("evaluate", *common, "--annotations", "boxes.csv", "-o", "study", "--json")
    row = record(outcome)
    assert (row["index"], row["label"]) == (index, f"box {number}, {name}")
    detector = gradcam.load_detector(f"{models_file}:detector", labels="../labels.txt", device="cpu")
    heatmap = detector.explain(street, target=targets.Box(number)).heatmaps[0][0]
    x0, y0, x1, y1 = map(int, box.split(","))
    share = float(heatmap[max(y0, 0) : y1, max(x0, 0) : x1].sum() / heatmap.sum())
    assert row["values"]["hirescam"]["energy-pointing"] == pytest.approx(share, abs=0.02)
    (folder / "study" / "examples.png").unlink()
    again = gradcam_command("evaluate", *common, "--annotations", "boxes.csv", "-o", "study", "--resume", "-q")
    assert again.status == 0
    assert "examples.png" in files(folder / "study")
    row = record(
        gradcam_command("evaluate", *common[:-3], "--metric", "complexity", "--no-controls", "--box", "1", "--json")
    )
    assert row["label"].startswith("box 1, ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layer"), [("fasterrcnn_resnet50_fpn", "backbone"), ("lraspp_mobilenet_v3_large", "backbone")]
)
def test_layers_mark_what_is_explained_where_none_is_named(gradcam_command: Command, name: str, layer: str) -> None:
    outcome = gradcam_command("layers", name)
    assert re.search(rf"^→ {layer} ", outcome.out, re.MULTILINE)
    assert outcome.out.splitlines()[-1] == f"gradcam run photo.jpg --model {name}"


# Output


def test_names_are_those_of_the_tables() -> None:
    assert {*OPTIONS_BY_TASK, "regression"} == set(TASKS)  # Regression takes the options of classification.


def report(task: str, predictions: list[Prediction], **entry: Any) -> list[str]:
    defaults = {
        "index": None, "label": "x", "score": 0.5, "layer": "l", "method": "m", "overlay": "o.png", "blank": False
    }  # fmt: skip
    explained = Explained(**(defaults | entry))
    row = Record("a.png", "net", None, predictions, [explained], size=(10, 20), region=(0, 5, 10, 10))
    return format_report(ImageOutcome(row, 0.1, grids=[(7, 7)], device="cpu", task=task)).splitlines()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"number": 3, "label": "person", "index": 1}, "box 3, person"),
        ({"number": 3, "label": "person", "index": 1, "edge": "top"}, "top edge of box 3, person"),
        ({"missed": True, "label": "person", "box": (1.0, 2.4, 3.0, 4.0)}, "missed person at 1,2,3,4"),
        ({"mask": "predicted", "label": "dog"}, "mask of dog"),
        ({"mask": "40,60", "label": "dog"}, "mask of dog at 40,60"),
        ({"text": "a dog"}, "a dog   cosine 0.500"),
        ({"text": "a dog", "against": ("a cat",)}, "a dog   contrast 0.500"),
        ({"like": "photos/other.jpg"}, "like other.jpg   cosine 0.500"),
        ({"like": "photos/other.jpg", "on": "reference"}, "in other.jpg   cosine 0.500"),
        ({"word": 2, "label": "dog"}, "word 2, dog"),
        ({"keypoint": 3, "label": "nose"}, "keypoint 3, nose"),
        ({"keypoint": 3, "label": "nose", "axis": "x"}, "x of keypoint 3, nose"),
        ({"keypoint": 3, "label": "keypoint 3"}, "keypoint 3"),
        ({"text": "a\x1b dog"}, r"a\x1b dog   cosine 0.500"),
    ],
)
def test_what_is_explained_has_a_name(entry: dict[str, Any], message: str) -> None:
    lines = report("matching", [], **entry)
    assert lines[2].startswith(f"  {message} at l (7 x 7)  →  ")
    assert lines[-1] == "  The model sees a centre crop: 10 x 10 of 20 x 10 pixels (50 %)."


def test_what_was_found_is_listed_up_to_ten() -> None:
    predictions = [Prediction(1, "dog", 0.9, number) for number in range(44)]
    lines = report("detection", predictions, number=0)
    assert lines[2].startswith("  0   dog    90 %   ")
    assert lines[11].startswith("  9   dog    90 %   ")
    assert lines[12] == "  and 34 more (see --json)"
    assert report("detection", predictions[:10], number=0)[12] == ""


def test_of_a_folder_results_are_no_pictures(run: Command, folder: Path, models_file: str) -> None:
    write_noise(folder / "photos" / "a.png", 0)
    for name in ("a-hirescam-box3-person.png", "a-gradcam-text-a_dog.png", "other-gradcam-like-a.png"):
        write_noise(folder / "photos" / name, 0)
    outcome = run("photos", "--model", "../mine.py:classes", "--size", 32, "--json")
    assert [item["image"] for item in records(outcome)] == ["photos/a.png"]


def test_an_unknown_task_is_refused(run: Command, street: Path, models_file: str) -> None:
    assert "'drawing'" in run(street, *DETECTOR, "--task", "drawing").err
