"""Test the GPU section of scripts/bench without a GPU, and the maps that its near checks use."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


def bench(*options: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "scripts" / "bench"), "--only", "gpu", *options]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_measures_nothing() -> None:
    actual = bench()
    assert "There is no CUDA device, or --device excludes it: nothing was measured." in actual
    assert "images per second" not in actual


@pytest.mark.slow
def test_it_can_be_tried_out_on_the_processor() -> None:
    actual = bench("--pictures", "2", "--rounds", "1", "--batch", "1", "--contender", "gradcam")
    assert actual.count("A test on the CPU in place of a GPU: these are not GPU figures.") == 5
    assert re.search(r"\| fp32, pixels on the GPU \| \d+", actual)
    stages = ["read", "decode", "decode and resize", "model and maps", "draw and encode", "write"]
    assert f"| gradcam | {' | '.join(stages)} |" in actual
    assert re.search(r"\| ResNet-18, layer4 \| 1 \| [\d.]+ ms \| [\d.]+ \(", actual)
    assert re.search(r"\| gradcam \| 1 \| \d{3} \| 0 \| 0 \|", actual)


@pytest.mark.cuda
def test_on_a_gpu_there_are_peaks_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from benchmark.gpu import find_peak

    assert find_peak("cuda", lambda: torch.empty(2**20, dtype=torch.uint8, device="cuda")) >= 2**20


def test_the_displacement_of_a_shape_is_the_distance_that_its_mass_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from benchmark.near_checks import measure_displacement

    heatmap, moved = torch.zeros(2, 56, 56)
    heatmap[8:24, 8:16] = 2
    moved[8:24, 24:32] = 1
    assert measure_displacement(heatmap, moved, (7, 7)) == pytest.approx(16)
    assert measure_displacement(heatmap, -moved, (7, 7)) == 0


def test_two_classes_are_confused_and_the_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from benchmark.near_checks import swap_classes

    explain = swap_classes(lambda model, images, classes: classes.float(), 1, 3)
    assert explain(torch.nn.Identity(), torch.zeros(5), torch.arange(5)).tolist() == [0, 3, 2, 1, 4]
