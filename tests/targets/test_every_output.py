"""Test each kind of target on each kind of output: a map, or a one-line error that says what to use instead."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

import gradcam
from gradcam.errors import GradcamError
from gradcam.targets import Box, ClassTarget, Keypoint, Like, Mask, MissedBox, Text, Token

SIZE = 32
ADVICE = re.compile(
    r"target|function|targets\.|--\w+|Pass|Choose|give |take |load |expected|leave|resize|reshape|Name |does not exist: ",
    re.IGNORECASE,
)


class Net(nn.Module):
    """A network of two convolutions, for images or volumes, with any form of output."""

    def __init__(self, finish: Callable[[Tensor], Any], dimensions: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        convolution = nn.Conv2d if dimensions == 2 else nn.Conv3d
        self.body = nn.Sequential(convolution(3, 8, 3, 2, 1), nn.ReLU(), convolution(8, 8, 3, 2, 1), nn.ReLU())
        self.head, self.finish = convolution(8, 5, 1), finish

    def forward(self, images: Tensor) -> Any:
        return self.finish(self.head(self.body(images)))


def detections(x: Tensor) -> list[dict[str, Tensor]]:
    box = torch.tensor([[2.0, 2.0, 20.0, 20.0]])
    return [
        {"boxes": box + row.mean(), "scores": row.mean((1, 2))[:1].sigmoid(), "labels": box[0, :1].long()} for row in x
    ]


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "logits": lambda x: x.mean((2, 3)),
    "single logit": lambda x: x.mean((2, 3))[:, 0],
    "probabilities": lambda x: x.mean((2, 3)).softmax(1),
    "dense": lambda x: interpolate(x, scale_factor=4.0),
    "dense of one class": lambda x: interpolate(x, scale_factor=4.0)[:, 0],
    "dict of dense": lambda x: {"out": x, "aux": x * 2},
    "list of dense": lambda x: [x, x[:, :, ::2, ::2]],
    "volume": lambda x: x,
    "detections": detections,
    "empty list": lambda x: [],
    "queries": lambda x: types.SimpleNamespace(logits=x.flatten(2).transpose(1, 2), pred_boxes=x.flatten(2)[:, :4]),
    "text": lambda x: {"logits": x.flatten(2).transpose(1, 2)},
    "embedding": lambda x: x.mean((2, 3)) / x.mean((2, 3)).norm(dim=1, keepdim=True),
    "tuple": lambda x: (x.mean((2, 3)), x),
    "tuple of dense": lambda x: (x, x.mean((2, 3))),
    "nothing": lambda x: None,
}


def sum_all(output: Any) -> Tensor:
    """Return one score for each of the two images, whatever the output is."""
    parts = [output] if isinstance(output, Tensor) else list(getattr(output, "values", lambda: output)())
    if isinstance(parts[0], dict):
        return torch.stack([part["scores"].sum() for part in parts])
    return parts[0].flatten(1).sum(1) if parts[0].ndim > 1 else parts[0]


TARGETS: dict[str, Any] = {
    "top class": None,
    "class": 1,
    "probability": ClassTarget(0, score="probability"),
    "contrast": ClassTarget(0, score="contrast"),
    "box": Box(0),
    "missed box": MissedBox((2, 2, 20, 20)),
    "predicted mask": Mask(),
    "mask in a box": Mask(1, (2, 2, 20, 20)),
    "mask at a point": Mask(mask=(5, 5)),
    "keypoint": Keypoint(0),
    "text": Text("a cat"),
    "embedded text": Text(torch.ones(5)),
    "likeness": Like(torch.rand(3, SIZE, SIZE)),
    "likeness to an embedding": Like(torch.ones(5)),
    "token": Token([1, 2]),
    "written caption": Token(),
    "function": sum_all,
}


@pytest.mark.filterwarnings("ignore::gradcam.errors.GradcamWarning")
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_map_or_a_line(target: str, output: str) -> None:
    is_volume = output == "volume"
    images = torch.rand(2, 3, *[SIZE] * (3 if is_volume else 2), generator=torch.Generator().manual_seed(1))
    model = Net(OUTPUTS[output], 3 if is_volume else 2).eval()
    if target == "function" and output in ("nothing", "empty list", "queries"):
        pytest.skip("the function itself fails")
    try:
        explanation = gradcam.explain(model, images, target=TARGETS[target])
    except GradcamError as error:
        message = str(error)
    else:
        assert explanation.heatmaps.shape[2:] == images.shape[2:]
        assert explanation.scores.isfinite().all()
        return
    assert "\n" not in message
    assert ADVICE.search(message), message


@pytest.mark.parametrize(
    ("target", "output", "message"),
    [
        (1, "dense", r"targets\.Mask"),
        (1, "detections", r"targets\.Box"),  # but not the edges of a single box
        (1, "queries", r"targets\.Box"),
        (1, "volume", "function"),
        (Mask(1), "volume", "function"),
        (Mask(1), "logits", "function"),
        (Mask(1), "detections", "function"),
    ],
)
def test_alternative_is_named(target: Any, output: str, message: str) -> None:
    images = torch.rand(1, 3, *[SIZE] * (3 if output == "volume" else 2))
    model = Net(OUTPUTS[output], 3 if output == "volume" else 2).eval()
    with pytest.raises(GradcamError, match=message):
        gradcam.explain(model, images, target=target)


def test_mask_without_channels() -> None:
    """Check a mask (N,h,w), which is that of one class, such as CLIPSeg's for a prompt."""
    images = torch.rand(1, 3, SIZE, SIZE)
    expected, without = (
        gradcam.explain(Net(finish).eval(), images, "body", target=Mask(1, (2, 2, 20, 20)))
        for finish in (lambda x: x[:, :1], lambda x: x[:, 0])
    )
    assert torch.equal(without.maps, expected.maps)
    assert without.maps.any()


def test_probability_of_probabilities() -> None:
    """Check that rows that sum to 1 count as probabilities. Their softmax would be nearly uniform."""
    model, images = Net(OUTPUTS["probabilities"]).eval(), torch.rand(2, 3, SIZE, SIZE)
    explanation = gradcam.explain(model, images, "body", target=ClassTarget(2, score="probability"))
    assert torch.allclose(explanation.scores[:, 0], explanation.output[:, 2])
    logits = gradcam.explain(Net(OUTPUTS["logits"]).eval(), images, "body", target=ClassTarget(2, score="probability"))
    assert torch.allclose(explanation.maps, logits.maps, atol=1e-6)
