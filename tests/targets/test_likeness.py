"""Test another image as the target: its possible forms, and the maps on it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradcam
from gradcam.errors import TargetError
from gradcam.targets.likeness import Like
from tests.adapters.test_embedding import PICTURES, draw, hugging_face, make_model
from tests.helpers import assert_same, traces

OTHER = draw(3, 32, 32, seed=5)


def explain(model: nn.Module, target: Like, pictures: Any = PICTURES, **options: Any) -> gradcam.Explanation:
    return gradcam.explain(model, pictures, "layer3", method="hirescam", target=target, **options)


def assert_close(maps: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(maps.double(), expected.double(), rtol=1e-6, atol=1e-7)


def test_a_picture_and_its_embedding_are_one_target() -> None:
    model = make_model("any module")
    vector = model(OTHER[None]).detach()
    expected = explain(model, Like(OTHER))
    for target in (Like(OTHER[None]), Like(vector[0]), Like(vector), Like(3 * vector)):
        explanation = explain(model, target)
        assert_close(explanation.maps, expected.maps)
        assert_close(explanation.scores, expected.scores)
        assert (explanation.reference is None) == (target.reference.ndim < 3)
    assert_close(expected.scores[:, 0], F.cosine_similarity(model(PICTURES), vector).detach())


def test_several_references_give_several_maps() -> None:
    model, references = make_model("any module"), torch.stack([OTHER, PICTURES[0]])
    explanation = explain(model, Like(references, "photo"))
    assert explanation.maps.shape[:2] == (2, 2)
    for k, reference in enumerate(references):
        assert_close(explanation.maps[:, k : k + 1], explain(model, Like(reference)).maps)
    assert [instance.name for instance in explanation.instances[0]] == ["photo 0", "photo 1"]
    assert [instance.name for instance in explain(model, Like(references, ["one", "two"])).instances[1]] == [
        "one",
        "two",
    ]
    assert explanation.reference is not None
    assert_close(explanation.reference.scores, explanation.scores.T)
    by_vectors = explain(model, Like(model(references).detach()))
    assert_close(by_vectors.maps, explanation.maps)


def test_a_reference_has_as_many_axes_as_the_pictures() -> None:
    model = nn.Sequential(nn.Conv3d(1, 4, 3), nn.AdaptiveAvgPool3d(1), nn.Flatten())
    message = r"The reference is an image \(1, 8, 8\), but the images are \(2, 1, 8, 8, 8\): pass the embedding"
    with pytest.raises(TargetError, match=message):
        gradcam.explain(model, torch.rand(2, 1, 8, 8, 8), "0", target=Like(torch.rand(1, 8, 8)))


def test_a_picture_is_most_like_itself() -> None:
    explanation = explain(make_model("any module"), Like(PICTURES[1]))
    assert explanation.scores[1, 0].item() == pytest.approx(1, abs=1e-6)
    assert explanation.scores[0, 0] < explanation.scores[1, 0]
    assert explanation.instances[1][0].score == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [
    "DINOv2", "CLIP", "timm, registers", "SigLIP", "open_clip, mean", "timm, rotated places", "any module",
    "open_clip, ResNet",
])  # fmt: skip
def test_nothing_would_make_a_picture_more_like_itself(kind: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(make_model(kind)).to(dtype)
    explanation = gradcam.explain(model, PICTURES.to(dtype), target=Like(PICTURES[[1, 0]].to(dtype)))
    assert not explanation.maps[1, 0].any()  # rounding errors are all that remains of the gradient
    assert not explanation.maps[0, 1].any()
    assert explanation.maps[0, 0].any() or explanation.maps[1, 1].any()


@pytest.mark.slow
def test_what_asks_no_gradient_still_shows_how_a_picture_is_like_itself() -> None:
    explanation = gradcam.explain(
        make_model("any module"), PICTURES[:1], target=Like(PICTURES[:1]), method="ablationcam"
    )
    assert explanation.maps.any()


def test_a_reference_of_another_size() -> None:
    model, larger = make_model("any module"), draw(3, 48, 64, seed=6)
    explanation = explain(model, Like(larger))
    assert explanation.reference is not None
    assert (explanation.heatmaps.shape, explanation.reference.heatmaps.shape) == ((2, 1, 32, 32), (1, 2, 48, 64))
    assert_close(explanation.scores[:, 0], F.cosine_similarity(model(PICTURES), model(larger[None])).detach())


def test_other_views_leave_the_reference_as_it_is() -> None:
    model = make_model("any module")
    plain, mirrored = (explain(model, Like(OTHER), item, evidence="signed") for item in (PICTURES, PICTURES.flip(-1)))
    flipped = explain(model, Like(OTHER), evidence="signed", augmentation="flip")
    assert plain.reference is not None
    assert flipped.reference is not None
    assert_close(flipped.reference.scores, plain.reference.scores)
    torch.testing.assert_close(flipped.maps, (plain.maps + mirrored.maps.flip(-1)) / 2, rtol=1e-5, atol=1e-8)


def test_nothing_is_left_behind() -> None:
    model = hugging_face(
        "Dinov2", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    model.train()
    reference = OTHER.clone().requires_grad_()
    before = traces(model)
    explanation = gradcam.explain(model, PICTURES, target=Like(reference))
    assert_same(before, traces(model))
    assert reference.grad is None
    assert not explanation.scores.requires_grad
    assert (explanation.method, explanation.layer) == ("grad-eclip", "attention")
    with torch.inference_mode():
        again = gradcam.explain(model, PICTURES.clone(), target=Like(OTHER.clone()))
    assert_close(again.maps, explanation.maps)


@pytest.mark.parametrize("wrong", ["other.jpg", Path("other.jpg"), np.zeros((3, 4, 4), np.float32), None, [OTHER]])
def test_files_are_read_by_what_is_loaded(wrong: Any) -> None:
    message = r"The reference is .*, expected a tensor: an image \(C,H,W\).* use gradcam.load_matcher"
    with pytest.raises(TargetError, match=message):
        explain(make_model("any module"), Like(wrong))


def test_what_is_no_reference() -> None:
    shapes = (torch.zeros(()), torch.zeros(1, 1, 3, 4, 4), torch.zeros(0, 3, 4, 4))
    for wrong in (torch.zeros(3, 4, 4, dtype=torch.uint8), *shapes):
        with pytest.raises(TargetError, match=r"The reference is torch\..*, expected a floating-point image \(C,H,W\)"):
            Like(wrong)
    with pytest.raises(TargetError, match="An embedding is zero, infinite or NaN"):
        explain(make_model("any module"), Like(torch.zeros(512)))
    with pytest.raises(TargetError, match="There are 2 references, but 1 names"):
        explain(make_model("any module"), Like(draw(2, 512), ["one"]))
