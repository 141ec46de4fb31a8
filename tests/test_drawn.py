"""Test faithfulness with known truth: models trained on drawn shapes, whose maps must lie on the requested shape.

Training used neither these images nor the photographs behind the shapes; see tests/drawn/README.md.
"""

import numpy as np
import pytest
import torch
from torch import nn

import gradcam
from tests import drawn
from tests.drawn import measures
from tests.drawn.heads import PROPERTIES, draw_training_scenes, fit_head, list_properties, load_encoder
from tests.drawn.pictures import Scene, draw_scenes, to_images

SEED = 90210  # training uses another seed
COUNT = 40


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return list(draw_scenes(SEED, COUNT))


@pytest.fixture(scope="module")
def detector() -> nn.Module:
    return drawn.load("detector")


def test_the_detector_knows_the_shapes(detector: nn.Module, scenes: list[Scene]) -> None:
    actual, right = measures.measure_detection(detector, scenes)
    assert min(actual, right) >= 0.9


def test_the_map_of_a_box_lies_in_it(detector: nn.Module, scenes: list[Scene]) -> None:
    verdicts = measures.judge_boxes(detector, scenes)
    energy, inside = measures.summarise(verdicts)
    assert len(verdicts) >= 0.9 * sum(len(scene.things) for scene in scenes)
    assert energy >= 0.75
    assert inside >= 0.95
    # A class-agnostic method could put its map on any box.
    assert measures.summarise(measures.judge_boxes(detector, scenes[:10], method="eigencam"))[0] < 0.5


def test_the_map_of_a_removed_box(detector: nn.Module, scenes: list[Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "score_thresh", 1.0)
    assert all(len(actual["scores"]) == 0 for actual in detector(list(to_images(scenes[:10]))))
    verdicts = measures.judge_missed(detector, [scene for scene in scenes if scene.things])
    assert measures.summarise(verdicts)[1] >= 0.95


def test_the_map_of_a_shape_that_is_too_faint_to_be_found_lies_on_it(detector: nn.Module) -> None:
    verdicts = measures.judge_missed(detector, list(measures.draw_missed(detector, SEED, COUNT)))
    assert measures.summarise(verdicts)[1] >= 0.9


@pytest.mark.slow
def test_the_map_of_a_mask_lies_in_it(scenes: list[Scene]) -> None:
    segmenter = drawn.load("segmenter")
    pixels, overlap = measures.measure_segmentation(segmenter, scenes)
    assert pixels >= 0.97
    assert overlap >= 0.8
    verdicts = measures.judge_masks(segmenter, scenes, layer="bottleneck")
    energy, inside = measures.summarise(verdicts)
    assert len(verdicts) >= 0.9 * sum(len(scene.things) for scene in scenes)
    assert energy >= 0.75
    assert inside >= 0.95
    # A class-agnostic method could put its map on any class.
    verdicts = measures.judge_masks(segmenter, scenes[:10], layer="bottleneck", method="eigencam")
    assert measures.summarise(verdicts)[0] < 0.4


@pytest.mark.slow
@pytest.mark.parametrize("alike", [False, True])
def test_the_map_of_a_sentence_is_of_the_shape_that_it_names(alike: bool) -> None:
    """Use three shapes, of which others share the shape or the colour of the named one."""
    verdicts = measures.judge_texts(drawn.load("convolutional"), list(measures.draw_three(SEED, COUNT, alike=alike)))
    assert measures.compute_accuracy(verdicts) >= 0.9


@pytest.mark.slow
def test_what_follows_attention_through_all_blocks_finds_the_shape_in_a_transformer() -> None:
    """Check methods that follow attention through all blocks: the last block no longer knows where things are."""
    tower, scenes = drawn.load("transformer"), list(measures.draw_three(SEED, COUNT, alike=False))
    assert measures.compute_accuracy(measures.judge_texts(tower, scenes, method="gradient-rollout")) >= 0.9
    assert measures.compute_accuracy(measures.judge_texts(tower, scenes, method="grad-eclip")) < 0.6


@pytest.mark.slow
def test_the_map_of_a_colour_in_a_swin_transformer_is_of_the_shape_of_that_colour() -> None:
    model, verdicts, agreements = drawn.load("swin"), [], []
    for scene in measures.draw_three(SEED, COUNT, alike=False):
        colours = [PROPERTIES.index(thing.name.split()[0]) for thing in scene.things]
        explanation = gradcam.explain(model, to_images([scene]), target=[colours])
        agreements.append(((explanation.output > 0) == (list_properties([scene]) > 0)).float().mean())
        masks = [measures.to_mask(thing) for thing in scene.things]
        for k, heatmap in enumerate(explanation.heatmaps[0]):
            verdicts.append(measures.score_map(heatmap, masks[k], masks[:k] + masks[k + 1 :]))
    assert np.mean(agreements) >= 0.9
    assert measures.compute_accuracy(verdicts) >= 0.9


@pytest.mark.slow
def test_a_linear_head_on_the_segmenters_encoder_estimates_the_area_of_the_shapes(scenes: list[Scene]) -> None:
    def measure_areas(drawn_scenes: list[Scene]) -> torch.Tensor:
        return torch.tensor([[sum(thing.mask.mean() for thing in scene.things)] for scene in drawn_scenes]).float()

    encoder, training_scenes = load_encoder(), draw_training_scenes()
    areas, head = measure_areas(scenes), fit_head(encoder, training_scenes, measure_areas(training_scenes))
    with torch.no_grad():
        errors = (head(encoder(to_images(scenes))) - areas).abs().mean()
    assert errors < 0.5 * (areas - areas.mean()).abs().mean()


def test_pictures_are_the_same_each_time() -> None:
    once, again = (list(draw_scenes(5, 3)) for _ in range(2))
    assert all(np.array_equal(before.picture, after.picture) for before, after in zip(once, again))
    assert not np.array_equal(once[0].picture, next(iter(draw_scenes(6, 1))).picture)


def test_a_map_elsewhere_is_found_out() -> None:
    """Test the measure itself, on maps made by hand."""
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[:2, :2] = True
    heatmap = torch.zeros(4, 4)
    heatmap[0, 0], heatmap[3, 3] = 1.0, 3.0
    assert measures.score_map(heatmap, mask) == measures.MapScore(0.25, False, True)
    assert measures.score_map(heatmap, mask, [mask.flip(0, 1)]) == measures.MapScore(0.25, False, False)
    assert measures.score_map(heatmap.flip(0, 1), mask, [mask.flip(0, 1)]) == measures.MapScore(0.75, True, True)
    assert measures.score_map(torch.zeros(4, 4), mask) == measures.MapScore(0.0, False, False)
