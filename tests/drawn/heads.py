"""Linear heads for the trained image towers, fitted in a second by least squares."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.transforms import Normalize

from tests.drawn.models import load
from tests.drawn.pictures import COLOURS, SHAPES, TRAINING, Scene, draw_scenes, to_images

PROPERTIES = (*SHAPES, *COLOURS)
REGULARISATION = 0.01


def draw_training_scenes(count: int = 400) -> list[Scene]:
    """Draw scenes with one to four shapes on the photographs for training."""
    return list(draw_scenes(1, count, photographs=TRAINING))


def list_properties(scenes: Sequence[Scene]) -> Tensor:
    """Return which of the `PROPERTIES` each scene contains: 1 or 0, (N,14)."""
    contents = torch.zeros(len(scenes), len(PROPERTIES))
    for row, scene in zip(contents, scenes):
        for thing in scene.things:
            row[[thing.shape, len(SHAPES) + thing.colour]] = 1
    return contents


@torch.no_grad()
def fit_head(backbone: nn.Module, scenes: Sequence[Scene], values: Tensor) -> nn.Linear:
    """Return a linear layer that predicts values (N,K) from the backbone's features (N,C), by ridge regression."""
    features = torch.cat([backbone(to_images(scenes[start : start + 50])) for start in range(0, len(scenes), 50)])
    values = values.float()
    centre, mean = features.mean(0), values.mean(0)
    centred = features - centre
    gram = centred.T @ centred + REGULARISATION * torch.eye(centred.shape[1])
    head = nn.Linear(centred.shape[1], values.shape[1])
    head.weight.copy_(torch.linalg.solve(gram, centred.T @ (values - mean)).T)
    head.bias.copy_(mean - head.weight @ centre)
    return head


def load_encoder() -> nn.Module:
    """Return the trained U-Net's encoder with its features averaged over the image: (N,48) from images (N,3,96,96)."""
    unet = load("segmenter")
    encoder = [unet.first, unet.second, unet.third, unet.bottleneck]
    return nn.Sequential(Normalize((0.45,) * 3, (0.25,) * 3), *encoder, nn.AdaptiveAvgPool2d(1), nn.Flatten())
