"""Test that all commands and Python blocks in README.md and docs/ run as printed, with the documented results."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from PIL import Image

import gradcam
from gradcam.cli import cli
from tests.docs.pages import ROOT, read_blocks, run_page
from tests.helpers import strict

README = ROOT / "README.md"
PAGES = [README, *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
RUN = [page for page in PAGES if any(block.language in ("python", "bash") for block in read_blocks(page))]
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")

PAGE_CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {}


def checks_page(page: str) -> Callable[[Callable[[dict[str, Any]], None]], Callable[[dict[str, Any]], None]]:
    """Register a check of a page's results: the names that its Python defined, and the files in the current folder."""

    def add(check: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        PAGE_CHECKS[page] = check
        return check

    return add


@checks_page("README.md")
def _(names: dict[str, Any]) -> None:
    expected = gradcam.load_classifier().explain("photo.jpg")
    assert np.array_equal(gradcam.read_image("overlay.png"), expected.overlay())
    assert names["explanation"].heatmaps.shape == (2, 2, 224, 224)
    assert len(list(Path("explained").glob("*gradcam*.jpg"))) == 2


@checks_page("docs/howto/timm.md")
def _(names: dict[str, Any]) -> None:
    assert names["explanation"].layer == "blocks.11.norm1"
    assert names["classifier"].label(967) == "espresso"
    assert names["classifier"].layer == "layer4"


@checks_page("docs/howto/huggingface.md")
def _(names: dict[str, Any]) -> None:
    classifier = names["classifier"]
    assert list(classifier.labels) == ["nothing", "coffee", "tea"]
    by_hand = classifier.explain("photo.jpg", target=1)
    torch.testing.assert_close(names["explanation"].maps, by_hand.maps, rtol=1e-4, atol=1e-7)


@checks_page("docs/howto/deep.md")
def _(names: dict[str, Any]) -> None:
    assert names["explanation"].classes.tolist() == [[1]]
    (note,) = names["explanation"].notes
    assert "65535" in note
    assert gradcam.read_image("scan-fracture.png").shape == (80, 100, 3)


@checks_page("docs/howto/training.md")
def _(names: dict[str, Any]) -> None:
    assert names["network"].training
    panels = sorted(path.name for path in Path("heatmaps").iterdir())
    assert panels == ["gradcam-000000.png", "gradcam-000002.png", "gradcam-000004.png"]
    images = names["images"]
    explanation = gradcam.explain(names["network"], images, "layer4", target=names["classes"], evidence="signed")
    events = read_logged_images("runs")
    assert len(events) == 4
    for i, image in enumerate(images):
        assert [step for step, _ in events[f"gradcam/{i}"]] == [0, 2, 4]
        expected = gradcam.overlay(image, explanation.heatmaps[i, 0], signed=True)
        assert np.array_equal(events[f"gradcam/{i}"][2][1], expected)
    folder = names["trainer"].log_dir
    steps = [step for step, _ in read_logged_images(folder)["gradcam/3"]] if list(Path(folder).glob("events*")) else []
    panels = sorted(path.name for path in Path(folder).glob("heatmaps/*"))
    assert steps == [0, 2, 4] or panels == [f"gradcam-{step:06}.png" for step in (0, 2, 4)]
    assert sorted(path.name for path in Path("out/heatmaps").iterdir())[0] == "gradcam-000000.png"


@checks_page("docs/howto/records.md")
def _(names: dict[str, Any]) -> None:
    assert [record.image for record in names["records"]] == ["coffee.jpg", "rocket.jpg"]
    assert names["result"].name == "other.png"


@checks_page("docs/reference/page.md")
def _(names: dict[str, Any]) -> None:
    explanation = gradcam.load_classifier().explain("photo.jpg", "layer4", evidence="signed")
    assert names["data"]["targets"]["names"][0] == "espresso"
    maps = explanation.maps.flatten().numpy()
    assert np.abs(names["maps"][0] - maps).max() <= 0.005 * np.abs(maps).max()


@checks_page("docs/howto/inside.md")
def _(names: dict[str, Any]) -> None:
    with np.load("features.npz") as file:
        assert file["names"].tolist() == ["coffee.jpg", "rocket.jpg"]
        assert file["head.1"].shape == (2, 1280, 1, 1)
    assert names["recorder"].steps == [0, 2]
    assert [name.shape[1] for name in names["features"].values()] == [256, 512]


@checks_page("docs/howto/trust.md")
def _(names: dict[str, Any]) -> None:
    assert names["verdict"].outcome == "passed"
    assert gradcam.read_image("photo-gradcam-check.png").ndim == 3


@checks_page("docs/howto/which_method.md")
def _(names: dict[str, Any]) -> None:
    written = {path.name for path in Path("results").iterdir()}
    assert {"results.csv", "results.json", "results.tex", "examples.png"} <= written


@checks_page("docs/start/folder.md")
def _(names: dict[str, Any]) -> None:
    counts = {}
    for folder in ("explained", "patterns", "chosen", "archive", "found"):
        counts[folder] = len([path for path in Path(folder).glob("**/*gradcam*.jpg") if "report" not in path.parts])
    assert counts == {"explained": 2, "patterns": 1, "chosen": 2, "archive": 1, "found": 2}


def read_logged_images(folder: str | Path) -> dict[str, list[tuple[int, Any]]]:
    """Return the images that TensorBoard would show, by tag: the step and the pixels of each."""
    import io

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [
            (event.step, np.array(Image.open(io.BytesIO(event.encoded_image_string)))) for event in events.Images(tag)
        ]
        for tag in events.Tags()["images"]
    }


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def is_slow(page: Path) -> bool:
    return any(block.mark == "slow" for block in read_blocks(page))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "page", [pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] if is_slow(page) else []) for page in RUN]
)
def test_what_the_page_prints_runs(page: Path, workspace: Path) -> None:
    names = run_page(page)
    PAGE_CHECKS.get(name_of(page), lambda _: None)(names)


def test_every_how_to_page_about_heatmaps_shows_an_image() -> None:
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES if page.parent.name == "howto"}
    del texts["index.md"]
    assert not [name for name, text in texts.items() if "eatmap" in text and not re.search(r"!\[|<!-- image ", text)]


DRAWING_COMMAND = re.compile(r"^gradcam (run|compare|check|page|inspect (activations|gradients))\b(?!.*--json)", re.M)
DRAWING_CODE = re.compile(r"\.save\(\"[^\"]*\.(png|jpg|pdf)|write_image\(|\.figure\(")


def test_every_section_whose_code_makes_an_image_shows_one() -> None:
    without = []
    for page in PAGES:
        if page.parent.name not in ("howto", "start", "explanation", "docs"):
            continue
        text = page.read_text(encoding="utf-8")
        # In a copy without code, every line that starts with "#" is a heading.
        prose = re.sub(r"^```.*?^```$", lambda block: " " * len(block[0]), text, flags=re.M | re.S)
        starts = [0, *(heading.start() for heading in re.finditer(r"^#+ ", prose, re.M)), len(text)]
        for start, end in itertools.pairwise(starts):
            section = text[start:end]
            blocks = re.findall(r"^```(bash|python)\n(.*?)^```$", section, re.M | re.S)
            draws = any((DRAWING_COMMAND if kind == "bash" else DRAWING_CODE).search(code) for kind, code in blocks)
            if draws and not re.search(r"!\[|<!-- image ", section):
                without.append((page.name, section.splitlines()[0]))
    assert without == []


def headings_of(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_cell_of_the_features_table_has_its_evidence() -> None:
    text = (ROOT / "docs/explanation/features.md").read_text(encoding="utf-8")
    header, _, *rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) > 25
    for row in rows:
        _, ours, *theirs = row
        link = re.fullmatch(r"\[.+\]\((.+?)\)", ours)
        assert link, row
        page, _, anchor = link[1].partition("#")
        target = ROOT / "docs/explanation" / page
        assert target.exists(), row
        assert not anchor or anchor in headings_of(target), row
        versions = [re.search(r" \((\d+\.\d+\.\d+)\)$", cell) for cell in theirs]
        assert [version and version[1] for version in versions] == [
            "1.5.7",
            "0.5.0",
            "0.9.0",
            "1.6.1",
            "2.0.2",
            "8.4.190",
        ]
    assert len(header) == 7  # The first cell is empty.


def test_every_check_belongs_to_a_page() -> None:
    assert set(PAGE_CHECKS) <= {name_of(page) for page in RUN}


def test_the_readme_is_of_one_screen_and_its_links_lead_somewhere() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.encode()) <= 10_000
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / link).exists(), link


def test_records_are_as_the_schemas_say(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Test records of images explained in many ways, and of an image that fails."""
    schemas = {
        name: strict(json.loads((ROOT / f"docs/reference/{name}.schema.json").read_text(encoding="utf-8")))
        for name in ("record", "run")
    }
    Path("photos/broken.jpg").write_bytes(b"nothing")
    several = "--method gradcam,layercam --layer layer3 --layer layer4 --class cup --save map".split()  # noqa: SIM905
    cli.main(["batch", "photos/", "-o", "out", "--quiet", *several], standalone_mode=False)
    cli.main(["batch", "more/", "-o", "tiles", "--quiet", "--fit", "tiles"], standalone_mode=False)
    capsys.readouterr()
    cli.main(["run", "photo.jpg", "--json"], standalone_mode=False)
    records = [json.loads(capsys.readouterr().out)]
    for folder, count in (("out", 3), ("tiles", 1)):
        lines = Path(folder, "manifest.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(lines) == count
        records += [json.loads(line) for line in lines]
        jsonschema.validate(json.loads(Path(folder, "run.json").read_text(encoding="utf-8")), schemas["run"])
    assert [record["error"] is None for record in records].count(False) == 1
    for record in records:
        jsonschema.validate(record, schemas["record"])


def test_every_mark_of_the_bench_has_its_table() -> None:
    pages = BENCHMARKS + README.read_text(encoding="utf-8")
    marks = re.findall(r"<!-- bench (.+?) -->\n(.*?)<!-- end -->", pages, re.S)
    assert {key for key, _ in marks} == {
        "summary", "environment", "agreement", "inplace", "time cpu", "fixed cpu", "classes cpu", "methods cpu",
        "precision cpu",
        "memory cpu", "perturbation cpu", "shell", "traits", "transformers cpu",
        "folder", "folder floor", "folder memory", "folder listing", "recording cpu", "features cpu", "callback cpu",
        "evaluation", "quality", "boxes", "time cuda", "classes cuda", "throughput cpu", "throughput cuda", "million",
        "engines", "engines shares", "engines memory", "detection cpu", "sentences cpu", "drawn", "page", "process",
        "folderchecks", "nearchecks", "intervals", "wordchecks", "wordtext", "wordcontext", "words quality",
        "words cost", "words memory",
        "busy", "ui", "gallery", "lighthouse", "looks", "gpu fixed cuda", "gpu folder cuda", "gpu floor cuda",
        "gpu memory cuda",
    }  # fmt: skip
    for key, text in marks:
        assert "not measured" not in text
        assert text.count("\n|") > 2 or key == "environment"
        assert text.strip()


def test_every_map_that_differs_from_peers_has_a_reason() -> None:
    section = BENCHMARKS.split("## Agreement with other libraries")[1].split("\n## ")[0]
    table, reasons = section.split("<!-- end -->")
    reason_text = reasons.lower().replace("++", "pp").replace("-", "")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 19
    for name, _, *cells in rows:
        lowest = min(float(cell.partition(" to ")[0]) for cell in cells if cell != "-")
        if lowest < 0.99:
            assert name.lower().replace("-", "") in reason_text, name
