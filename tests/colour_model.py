"""A network for five colours with known explanations: the evidence for a class is where its colour is."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import gradcam

LABELS = ("red", "green", "blue", "yellow", "cyan")
COLOURS = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1))
SIZE = 32


class ColourNet(nn.Module):
    """A model whose logits are the fraction of the image in each colour; it accepts any image size."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Conv2d(3, 5, 4, stride=4)
        self.relu = nn.ReLU()
        colours = torch.tensor(COLOURS).float()
        with torch.no_grad():
            self.cells.weight.copy_((2 * colours - 1)[:, :, None, None].expand(-1, -1, 4, 4) / 16)
            self.cells.bias.copy_(0.4 - colours.sum(1))

    def forward(self, images: Tensor) -> Tensor:
        return 60 * self.relu(self.cells(images)).mean((2, 3))


def make() -> nn.Module:
    return ColourNet()


def load() -> gradcam.Classifier:
    """Load the classifier for 32 x 32 pixels with values in [0,1]."""
    return gradcam.load_classifier(
        make(), labels=list(LABELS), mean=(0, 0, 0), std=(1, 1, 1), size=SIZE, crop=1.0, layer="relu"
    )


def paint(path: Path, colour: int, seed: int = 0, *, side: int = 16, noise: int = 60) -> Path:
    """Paint a square of one colour at a random position on dark noise, 40 x 36 pixels."""
    generator = np.random.default_rng(seed)
    picture = (generator.random((36, 40, 3)) * noise).astype(np.uint8)
    y0, x0 = generator.integers(4, 12, 2)
    picture[y0 : y0 + side, x0 : x0 + side] = np.array(COLOURS[colour]) * 225 + 20
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(path)
    return path


def paint_all(folder: Path) -> Path:
    """Paint one image of each colour, and a second red and a second green image."""
    for number, colour in enumerate([0, 1, 2, 3, 4, 0, 1]):
        paint(folder / f"{number}-{LABELS[colour]}.png", colour, seed=number)
    return folder
