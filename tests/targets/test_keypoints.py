"""Test the keypoint target: invalid arguments, and models without keypoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradcam
from gradcam.errors import TargetError
from gradcam.targets.keypoints import Keypoint
from tests.detectors import make_detector, make_pictures

NOWHERE = "The keypoint is .*, expected a number from 0, several numbers, or 'all'"


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, 4, 1), nn.ReLU(), nn.Conv2d(4, 5, 1)).eval()


@pytest.fixture
def pictures() -> Tensor:
    return torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"number": -1}, NOWHERE),
        ({"number": "nose"}, NOWHERE),
        ({"number": []}, NOWHERE),
        ({"number": [0, True]}, NOWHERE),
        ({"number": 0, "axis": "z"}, "There is no axis 'z': choose x, y"),
        ({"number": 0, "box": -1}, "The box is -1, expected the number of a box"),
        ({"number": 0, "temperature": 0}, "The temperature is 0, expected a number above 0"),
    ],
)
def test_bad_input(arguments: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message) as error:
        Keypoint(**arguments)
    assert "\n" not in str(error.value)


def test_forms_of_a_number(model: nn.Module, pictures: Tensor) -> None:
    everything = gradcam.explain(model, pictures, "0", target=Keypoint(all))
    assert everything.maps.shape[1] == 5
    for numbers in ([3, 1], (3, 1), range(3, 0, -2)):
        explanation = gradcam.explain(model, pictures, "0", target=Keypoint(numbers))
        assert torch.equal(explanation.maps, everything.maps[:, [3, 1]])
        assert torch.equal(explanation.scores, everything.scores[:, [3, 1]])
    assert torch.equal(gradcam.explain(model, pictures, "0", target=Keypoint("all")).maps, everything.maps)
    assert torch.equal(gradcam.explain(model, pictures, "0", target=Keypoint(4)).maps, everything.maps[:, [4]])


def test_what_is_not_there(model: nn.Module, pictures: Tensor) -> None:
    with pytest.raises(TargetError, match="There is no keypoint 5: the numbers are 0 to 4"):
        gradcam.explain(model, pictures, "0", target=Keypoint([1, 5]))
    with pytest.raises(TargetError, match="There is no box 1 in image 0: the keypoint heatmaps cover the whole image"):
        gradcam.explain(model, pictures, "0", target=Keypoint(1, box=1))
    detector, listed = make_detector("keypointrcnn"), make_pictures()
    with pytest.raises(TargetError, match="There is no box 12 in image 0: the numbers are 0 to 11"):
        gradcam.explain(detector, listed, target=Keypoint(1, box=12))
    with pytest.raises(TargetError, match="There is no keypoint 3: the numbers are 0 to 2"):
        gradcam.explain(detector, listed, target=Keypoint(3))
    detector.roi_heads.score_thresh = 1.0
    with pytest.raises(TargetError, match="No box with keypoints was found in the image"):
        gradcam.explain(detector, listed[:1], target=Keypoint(0))


@pytest.mark.parametrize(
    ("tail", "message"), [(nn.Flatten(), r"Sequential returned a tensor \(2, 384\)"), (nn.Linear(12, 2), None)]
)
def test_a_model_without_heatmaps(tail: nn.Module, message: str | None, pictures: Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 4, 1), nn.ReLU(), tail).eval()
    if message is None:  # these are maps, whatever the axes are called
        assert gradcam.explain(model, pictures, "0", target=Keypoint(0)).maps.shape[0] == 2
        return
    with pytest.raises(TargetError, match=message):
        gradcam.explain(model, pictures, "0", target=Keypoint(0))


def test_other_views_have_their_places_elsewhere(model: nn.Module, pictures: Tensor) -> None:
    with pytest.raises(TargetError, match="leave augmentation= out"):
        gradcam.explain(model, pictures, "0", target=Keypoint(0, "x"), augmentation="flip")
