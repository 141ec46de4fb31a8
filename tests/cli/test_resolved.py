"""Test that run.json records resolved defaults, and that a resumed run keeps them even if this version has others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradcam.models import probe
from gradcam.storage.store import Store
from tests.cli.test_cli import Command, Outcome, folder, gradcam_command
from tests.cli.test_tasks import write_noise
from tests.stores import ObjectStore, objects

__all__ = ["folder", "gradcam_command"]  # fixtures

MODELS = """
import torch
from torch import nn


def classes():
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 8, 3, 4), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def segmenter():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 3, 1))
"""
NAMES = ["a.png", "b.png", "c.png", "d.png"]
EARLIER_LAYER, LAYER = "1", "3"  # The default layers of the earlier and of this version.

Batch = Callable[..., Outcome]
Patch = pytest.MonkeyPatch


@pytest.fixture
def batch(gradcam_command: Command, folder: Path) -> Batch:
    """Return a function that runs `gradcam batch` on four images with a small classifier."""
    for seed, name in enumerate(NAMES):
        write_noise(folder / "images" / name, seed)
    (folder.parent / "mine.py").write_text(MODELS)
    options = ("images", "--model", "../mine.py:classes", "--size", 64, "--device", "cpu", "--batch-size", 1, "--quiet")
    return lambda *arguments, output="out": gradcam_command("batch", *options, "-o", output, *arguments)


@pytest.fixture
def earlier(monkeypatch: Patch) -> Iterator[Patch]:
    """Let the package choose the layers of an earlier version, until `undo` is called."""
    find_defaults = probe.find_defaults

    def find_earlier_defaults(parts: Any, preprocess: Any, layer: str | None) -> Any:
        findings, *layers = find_defaults(parts, preprocess, layer)
        return findings, *(layers if layer is not None else (EARLIER_LAYER, "2"))

    with monkeypatch.context() as patch:
        patch.setattr("gradcam.models.load.find_defaults", find_earlier_defaults)
        yield patch


def read_run(folder: Path) -> dict[str, Any]:
    run: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return run


def change_run(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    run = read_run(folder)
    change(run)
    (folder / "run.json").write_text(json.dumps(run))


def cut_manifest(folder: Path) -> None:
    """Cut the manifest after the second image, as if the run had stopped there."""
    lines = (folder / "manifest.jsonl").read_text().splitlines(keepends=True)
    (folder / "manifest.jsonl").write_text("".join(lines[:2]))


def list_results(folder: Path) -> list[tuple[str, ...]]:
    """List the distinct results of the images, each as (layer, method) pairs."""
    records = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    assert [record["image"] for record in records] == NAMES
    results = (tuple(f"{item['method']} at {item['layer']}" for item in record["explained"]) for record in records)
    return list(dict.fromkeys(results))


def forget_resolved(run: dict[str, Any]) -> None:
    """Remove the resolved defaults, which earlier versions did not write to run.json."""
    del run["resolved"]


def test_run_json_records_layers_methods_layouts_and_output(batch: Batch, folder: Path) -> None:
    assert batch("--method", "gradcam,rise").status == 0
    assert read_run(folder / "out")["resolved"] == {
        "layers": [LAYER], "methods": ["gradcam", "rise"], "layouts": {LAYER: "channels first"}, "output": None
    }  # fmt: skip


@pytest.mark.parametrize("change", [lambda run: None, forget_resolved])
@pytest.mark.parametrize(
    "results", [("gradcam at 1",), ("xgradcam at 2", "gradcam at 1"), ("gradcam at 1", "guided-gradcam at 1")]
)
def test_a_resumed_run_keeps_the_layers_that_it_began_with(
    batch: Batch, folder: Path, earlier: Patch, change: Any, results: tuple[str, ...]
) -> None:
    options = ("--method", ",".join(result.partition(" ")[0] for result in results))
    assert batch(*options).status == 0
    expected = {path.name: path.read_bytes() for path in (folder / "out").glob("*.jpg")}
    earlier.undo()
    cut_manifest(folder / "out")
    change_run(folder / "out", change)
    assert (batch(*options, "--resume").status, list_results(folder / "out")) == (0, [results])
    assert {path.name: path.read_bytes() for path in (folder / "out").glob("*.jpg")} == expected
    assert read_run(folder / "out")["resolved"]["layers"] == read_run(folder / "out")["settings"]["layers"]
    assert batch(*options, "--overwrite").status == 0
    assert LAYER in read_run(folder / "out")["resolved"]["layers"]


@pytest.mark.slow
def test_other_processes_keep_the_layers_too(batch: Batch, folder: Path, earlier: Patch) -> None:
    assert batch().status == 0
    earlier.undo()
    cut_manifest(folder / "out")
    assert batch("--processes", 2, "--resume").status == 0
    assert list_results(folder / "out") == [("gradcam at 1",)]


def test_another_shard_keeps_the_layers_of_the_first(batch: Batch, folder: Path, earlier: Patch) -> None:
    assert batch("--shard", "1/2").status == 0
    earlier.undo()
    assert batch("--shard", "2/2").status == 0
    runs = [json.loads(path.read_text()) for path in (folder / "out").glob("run-*.json")]
    assert [run["resolved"]["layers"] for run in runs] == [[EARLIER_LAYER]] * 2
    assert batch("--overwrite").status == 0
    assert list_results(folder / "out") == [("gradcam at 3",)]


@pytest.mark.parametrize("output_format", ["files", "webdataset"])
def test_a_run_in_a_store_keeps_its_layers(batch: Batch, earlier: Patch, output_format: str) -> None:
    url = "objects://bucket/out"
    with objects() as fs:
        assert isinstance(fs, type(ObjectStore))
        assert batch("--output-format", output_format, output=url).status == 0
        earlier.undo()
        store = Store(url)
        store.write("run.json", store.read("run.json").replace(b'"channels first"', b'"tokens"'))
        batch("--output-format", output_format, "--resume", output=url).check_error(2, "layouts.1: tokens → channels")
        store.write("run.json", store.read("run.json").replace(b'"tokens"', b'"channels first"'))
        assert batch("--output-format", output_format, "--resume", output=url).status == 0
        assert json.loads(store.read("run.json"))["resolved"]["layers"] == [EARLIER_LAYER]


@pytest.mark.parametrize(
    ("resolved", "difference"),
    [
        ({"layouts": {LAYER: "channels last"}}, "layouts.3: channels last → channels first"),
        ({"output": "logits"}, "output: logits → null"),
        ({"methods": ["hirescam"]}, r'methods: ["hirescam"] → ["gradcam"]'),
    ],
)
def test_changed_settings_are_refused(batch: Batch, folder: Path, resolved: dict[str, Any], difference: str) -> None:
    assert batch().status == 0
    cut_manifest(folder / "out")
    change_run(folder / "out", lambda run: run["resolved"].update(resolved))
    before = {path: path.read_bytes() for path in (folder / "out").iterdir()}
    outcome = batch("--resume")
    assert (outcome.status, outcome.err.count("\n")) == (2, 1)
    assert f"out/: the earlier run had other settings: {difference}. Give the same settings, start again" in outcome.err
    assert "--overwrite, or choose another --output" in outcome.err
    assert {path: path.read_bytes() for path in (folder / "out").iterdir()} == before
    assert batch("--overwrite").status == 0
    assert list_results(folder / "out") == [("gradcam at 3",)]


def test_a_named_layer_is_compared_with_the_recorded_one(batch: Batch, folder: Path, earlier: Patch) -> None:
    assert batch().status == 0
    earlier.undo()
    batch("--resume", "--layer", LAYER).check_error(2, 'layers: ["1"] → ["3"]')
    assert batch("--resume", "--layer", EARLIER_LAYER).status == 0


@pytest.mark.parametrize("layers", [5, [], [5], ["missing"], ["1 + 2"], [None, "1"]])
def test_a_damaged_run_json_is_refused_in_one_line(batch: Batch, folder: Path, layers: Any) -> None:
    assert batch().status == 0
    for change in (lambda run: run["resolved"].update(layers=layers), lambda run: run.update(resolved=layers)):
        change_run(folder / "out", change)
        outcome = batch("--resume")
        assert (outcome.status, outcome.err.count("\n")) == (2, 1)


@pytest.mark.parametrize("change", [lambda run: None, forget_resolved])
def test_a_resumed_segmentation_keeps_the_layer_of_its_records(batch: Batch, folder: Path, change: Any) -> None:
    options = ("--model", "../mine.py:segmenter", "--task", "segmentation")
    assert batch(*options).status == 0
    assert read_run(folder / "out")["resolved"]["methods"] == ["hirescam"]
    assert list_results(folder / "out") == [("hirescam at 1",)]
    assert batch(*options, "--layer", "3", output="expected").status == 0
    for name in NAMES[:2]:  # The earlier version finished these images.
        overlay = Path("expected") / name.replace(".png", "-hirescam.jpg")
        (folder / "out" / overlay.name).write_bytes(overlay.read_bytes())
    (folder / "out" / "manifest.jsonl").write_text((folder / "expected" / "manifest.jsonl").read_text())
    cut_manifest(folder / "out")
    change_run(folder / "out", lambda run: run["resolved"].update(layers=["3"]))
    change_run(folder / "out", lambda run: run["resolved"].update(layouts={"3": "channels first"}))
    change_run(folder / "out", change)
    assert batch(*options, "--resume").status == 0
    assert list_results(folder / "out") == [("hirescam at 3",)]


def test_a_folder_of_hugging_face_is_explained_resumed_and_evaluated(gradcam_command: Command, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(**small, image_size=64, patch_size=16, num_labels=3)
    transformers.ViTForImageClassification(config).save_pretrained(folder / "model")
    transformers.ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder / "model")
    for seed, name in enumerate(NAMES[:2]):
        write_noise(folder / "images" / name, seed)
    options = ("images", "--model", "hf:model", "--device", "cpu", "--quiet")
    assert gradcam_command("batch", *options, "-o", "out").status == 0
    assert read_run(folder / "out")["settings"]["preprocessing"]["size"] == {"height": 64, "width": 64}
    assert gradcam_command("batch", *options, "-o", "out", "--resume").status == 0
    (folder / "out" / "a-gradcam.jpg").unlink()
    (folder / "model" / "preprocessor_config.json").write_text(
        (folder / "model" / "preprocessor_config.json").read_text().replace("0.5", "0.4")
    )
    resumed = gradcam_command("batch", *options, "-o", "out", "--resume")
    assert (resumed.status, "preprocessing" in resumed.err) == (2, True), resumed.err
    evaluated = gradcam_command("evaluate", *options[:-1], "--method", "gradcam,layercam", "--metric", "complexity")
    assert evaluated.status == 0, evaluated.err
    assert "layercam" in evaluated.out
