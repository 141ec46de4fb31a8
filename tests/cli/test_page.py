"""Test `gradcam page` and `gradcam batch --pages`."""

from __future__ import annotations

import json
import re
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gradcam
from gradcam.cli import cli
from tests.cli.test_tasks import MODELS, PREPROCESSING, write_noise
from tests.web.test_page import read, read_tags

FAST = ["--layer", "layer4"]
HOSTILE = "<img src=x onerror=alert(1)>.jpg"


def run(*words: str | Path, status: int = 0) -> Any:
    result = CliRunner().invoke(cli, list(map(str, words)), standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert status == 2, result.exception
        return result
    assert (result.return_value or 0) == status, result.output
    return result


def write_huge(path: Path) -> None:
    """Write a PNG file that declares 60,000 x 60,000 pixels and contains almost no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 1000)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b""))


def test_one_picture_is_one_file(photo: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(photo("coffee.jpg"), tmp_path)
    output = run("page", "coffee.jpg", *FAST, "-o", "photo.html", "--class", "tripod").output
    data = read(tmp_path / "photo.html")
    assert data["image"]["name"] == "coffee.jpg"
    assert data["targets"]["names"][data["first"]] == "tripod"
    assert data["model"]["words"] == []
    assert data["verdict"] is None
    assert "photo.html" in output
    assert {path.name for path in tmp_path.iterdir()} == {"coffee.jpg", "photo.html"}
    assert not run("page", "coffee.jpg", *FAST, "--quiet").output
    assert read(tmp_path / "coffee.html") == read(tmp_path / "photo.html") | {"first": 0}


def test_the_verdict_is_of_the_map_that_is_shown_first(photo: Callable[[str], Path], tmp_path: Path) -> None:
    run("page", photo("coffee.jpg"), *FAST, "-o", tmp_path / "a.html", "--check")
    data = read(tmp_path / "a.html")
    expected = gradcam.evaluation.check(gradcam.load_classifier(), photo("coffee.jpg"), layer="layer4")
    assert data["verdict"]["outcome"] == expected.outcome
    assert "espresso (967)" in data["verdict"]["of"]
    assert [test["outcome"] for test in data["verdict"]["tests"]] == [test.outcome for test in expected.tests]


def test_the_verdict_of_a_named_class_is_printed(photo: Callable[[str], Path], tmp_path: Path) -> None:
    result = run(
        "page", photo("cat_and_espresso.jpg"), *FAST, "-o", tmp_path / "a.html", "--check", "--class", "espresso"
    )
    verdict = read(tmp_path / "a.html")["verdict"]
    expected = gradcam.evaluation.check(
        gradcam.load_classifier(), photo("cat_and_espresso.jpg"), layer="layer4", target="espresso"
    )
    assert "espresso (967)" in verdict["of"]
    assert [test["outcome"] for test in verdict["tests"]] == [test.outcome for test in expected.tests]
    assert f"Check: {expected.outcome}." in result.output


def test_a_folder_has_a_page_for_each_and_a_gallery(photo: Callable[[str], Path], tmp_path: Path) -> None:
    pictures, pages = tmp_path / "photos", tmp_path / "pages"
    (pictures / "more").mkdir(parents=True)
    shutil.copy(photo("coffee.jpg"), pictures / "index.jpg")  # Its page must not replace the gallery.
    shutil.copy(photo("coffee.jpg"), pictures / HOSTILE)
    shutil.copy(photo("rocket.jpg"), pictures / "more")
    (pictures / "text.jpg").write_text("this is a text")
    write_huge(pictures / "huge.png")
    result = run("page", pictures, "-o", pages, *FAST, status=1)
    for name in ("text.jpg", "huge.png"):
        assert sum(line.startswith(f"{name}: ") for line in result.output.splitlines()) == 1
    records = {record.image: record for record in gradcam.read_manifest(pages)}
    page_names = {name: record.page for name, record in records.items() if record.error is None}
    assert page_names.keys() == {"index.jpg", HOSTILE, "more/rocket.jpg"}
    assert page_names["index.jpg"] == "index-page.html"
    for name, page in page_names.items():
        data = read(pages / str(page))
        assert data["image"]["name"] == Path(name).name
        assert (pages / str(page)).parent.joinpath(data["link"]).resolve() == (pages / "index.html").resolve()
    details = "".join(path.read_text() for path in pages.glob("report/details-*/*.js"))
    assert '"page":"more/rocket.html"' in details
    assert run("page", pictures, "-o", pages, *FAST, status=2).exception is not None
    run("page", pictures, "-o", pages, *FAST, "--overwrite", status=1)


def test_batch_writes_the_same_pages(photo: Callable[[str], Path], tmp_path: Path) -> None:
    pictures = tmp_path / "photos"
    pictures.mkdir()
    shutil.copy(photo("coffee.jpg"), pictures)
    run("batch", pictures, "-o", tmp_path / "out", "--report", "--pages", "-q")
    run("page", pictures / "coffee.jpg", "-o", tmp_path / "one.html", *FAST, "-q")
    assert read(tmp_path / "out/coffee.html") == read(tmp_path / "one.html") | {"link": "index.html"}
    run("batch", pictures, "-o", tmp_path / "plain", "--pages", "-q")
    assert read(tmp_path / "plain/coffee.html")["link"] is None
    assert not (tmp_path / "plain/index.html").exists()
    run("batch", pictures, "-o", tmp_path / "out", "--overwrite", "-q")
    assert not (tmp_path / "out/coffee.html").exists()


def test_the_copied_code_works(photo: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the model options in the commands and the Python code that the page shows for copying."""
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(f"it's {i}" for i in range(1000)))
    monkeypatch.chdir(tmp_path)
    for typed in ("labels.txt", labels):  # The page must not contain local paths.
        run("page", photo("coffee.jpg"), *FAST, "--labels", typed, "-o", "a.html", "-q")
        data = read(tmp_path / "a.html")
        assert data["model"]["words"] == ["--labels", "labels.txt"]
        assert str(tmp_path) not in (tmp_path / "a.html").read_text()
    classifier = eval(data["model"]["code"], {"gradcam": gradcam})
    assert classifier.label(3) == "it's 3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.jpg", "b.jpg"], "give a folder to --output"),
        (["a.jpg", "b.jpg", "-o", "x.html"], "x.html is one file"),
        (["a.jpg", "b.jpg", "-o", "out", "--resume", "--overwrite"], "give only one of them"),
        (["a.jpg", "--method", "gradcamm"], "gradcam"),
        (["a.jpg", "--top", "0"], "0 is out of range"),
        (["a.jpg", "--url", "example.org"], "'example.org' is not an absolute URL"),
        (["a.jpg", "b.jpg", "-o", "out", "--url", "https://example.org/"], "--url needs exactly one image"),
    ],
)
def test_wrong_usage(words: list[str], message: str) -> None:
    assert message in str(run("page", *words, status=2).exception)


def test_bad_files_are_a_line_each(tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("this is a text")
    write_huge(tmp_path / "huge.png")
    for name in ("text.jpg", "huge.png", "gone.jpg"):
        result = run("page", tmp_path / name, "-o", tmp_path / "a.html", *FAST, status=1)
        (line,) = result.output.strip().splitlines()
        assert line.startswith(str(tmp_path / name))
        assert not (tmp_path / "a.html").exists()
    assert not re.search("Traceback", result.output)
    assert json.dumps(line)


def test_a_published_page_has_a_preview(
    photo: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(photo("coffee.jpg"), "coffee.jpg")
    for _ in range(2):
        output = run("page", "coffee.jpg", *FAST, "--url", "https://example.org/a/").output
        assert "coffee.png   preview" in output
    assert read_tags(Path("coffee.html"))["og:image"] == "https://example.org/a/coffee.png"
    assert gradcam.read_image("coffee.png").shape == gradcam.read_image("coffee.jpg").shape
    assert sorted(path.name for path in tmp_path.iterdir()) == ["coffee.html", "coffee.jpg", "coffee.png"]


def test_a_preview_does_not_replace_the_image_itself(
    photo: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gradcam.write_image("coffee.png", gradcam.read_image(photo("coffee.jpg")))
    content = Path("coffee.png").read_bytes()
    result = run("page", "coffee.png", *FAST, "--url", "https://example.org/", status=2)
    assert str(result.exception).startswith("coffee.png exists already")
    assert "\n" not in str(result.exception)
    assert (Path("coffee.png").read_bytes(), list(tmp_path.glob("*.html"))) == (content, [])
    run("page", "coffee.png", *FAST, "--url", "https://example.org/", "-o", "shared.html")


TASKS = {
    "classification": ("classes", "--size", "32", *PREPROCESSING),
    "detection": ("detector",),
    "segmentation": ("segmenter", "--size", "32", *PREPROCESSING),
    "matching": ("towers", "--size", "32", *PREPROCESSING, "--text", "red", "--text", "green"),
    "captioning": ("captioner", "--size", "32x32", *PREPROCESSING),
    "pose": ("segmenter", "--size", "32", *PREPROCESSING, "--keypoint", "all"),
}


@pytest.mark.parametrize("task", TASKS)
def test_one_page_and_the_pages_of_a_batch_are_equal(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    write_noise(tmp_path / "photos" / "a.png", 0)
    arguments = ["--model", f"mine.py:{TASKS[task][0]}", *TASKS[task][1:], "--task", task, "--device", "cpu", "-q"]
    run("page", "photos/a.png", "-o", "a.html", *arguments)
    run("page", "photos", "-o", "pages", *arguments)
    run("batch", "photos", "-o", "out", "--pages", *arguments)
    data = read(tmp_path / "a.html")
    assert len(data["targets"]["names"]) > 1
    assert data["model"]["words"][-2:] == ["--task", task]
    assert f'task="{task}"' in data["model"]["code"] or task == "classification"
    assert read(tmp_path / "pages/a.html") == data | {"link": "index.html"}
    alone = read(tmp_path / "out/a.html")
    assert alone["targets"] == data["targets"]
    assert alone["maps"][0] == data["maps"][0]
    model = eval(data["model"]["code"], {"gradcam": gradcam})
    target = gradcam.targets.Text(["red", "green"]) if task == "matching" else None
    target = gradcam.targets.Keypoint("all") if task == "pose" else target
    page = gradcam.page("photos/a.png", model, target=target)
    assert page.to_data()["targets"] == data["targets"]
    if task != "classification":
        explanation = model.explain("photos/a.png", target=target or page_target(page), evidence="signed")
        assert explanation.page().to_data()["targets"] == data["targets"]


def page_target(page: Any) -> Any:
    """Return the target that explains all targets of a page together."""
    if page.targets.kind == "mask":
        return gradcam.targets.Mask(page.targets.indices)
    return gradcam.targets.Box(all) if page.targets.kind == "box" else None
