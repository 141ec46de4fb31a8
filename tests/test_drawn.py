"""Faithfulness where the truth is known: models trained on drawn shapes, whose maps have to lie on what was asked for.

Neither the pictures nor the photographs behind them were seen in training; tests/drawn/README.md tells of that.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradcam
from gradcam import targets
from tests import drawn
from tests.drawn import measures
from tests.drawn.pictures import LARGEST, SIZE, Scene, draw_scenes, to_images

SEED = 90210  # of what is judged here; training has another
COUNT = 40


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return list(draw_scenes(SEED, COUNT))


@pytest.fixture(scope="module")
def detector() -> nn.Module:
    return drawn.load("detector")


@pytest.fixture(scope="module")
def segmenter() -> nn.Module:
    return drawn.load("segmenter")


def test_the_models_know_the_shapes(detector: nn.Module, segmenter: nn.Module, scenes: list[Scene]) -> None:
    found, right = measures.share_found(detector, scenes)
    assert found >= 0.9
    assert right >= 0.9
    pixels, overlap = measures.share_of_pixels(segmenter, scenes)
    assert pixels >= 0.97
    assert overlap >= 0.8


def test_the_map_of_a_box_lies_in_it(detector: nn.Module, scenes: list[Scene]) -> None:
    verdicts = measures.judge_boxes(detector, scenes)
    energy, inside = measures.summarise(verdicts)
    assert len(verdicts) >= 0.9 * sum(len(scene.things) for scene in scenes)
    assert energy >= 0.75
    assert inside >= 0.95
