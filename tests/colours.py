"""A network that tells six colours apart, and whose maps are known: its truth is where the colour is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import gradcam
from gradcam.models.preprocess import Preprocessing

COLOURS = ("red", "green", "blue", "cyan", "magenta", "yellow")
SIGNS = torch.tensor([[1, -1, -1], [-1, 1, -1], [-1, -1, 1], [-1, 1, 1], [1, -1, 1], [1, 1, -1]]).float()
SIZE = 8


class Turn(nn.Module):
    """Roll the input by half of its height and width: in a mosaic, this moves each cell to the opposite corner."""

    def forward(self, x: Tensor) -> Tensor:
        return x.roll((x.shape[2] // 2, x.shape[3] // 2), (2, 3))


class ColourNet(nn.Module):
    """Colours in [-1,1] to logits: the mean of what a colour's channel has above all other colours. At `colour` and
    `active` a class's map is where the colour is; at `turn` it is in the opposite cell."""

    def __init__(self) -> None:
        super().__init__()
        self.colour = nn.Conv2d(3, 6, 1)
        self.active = nn.ReLU()
        self.turn = Turn()
        self.head = nn.Linear(6, 6)
        with torch.no_grad():
            self.colour.weight.copy_(SIGNS[:, :, None, None])
            self.colour.bias.fill_(-1)
            self.head.weight.copy_(10 * torch.eye(6))
            self.head.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.turn(self.active(self.colour(x))).mean((2, 3)))


def classifier_of(model: nn.Module, layer: str = "turn") -> gradcam.Classifier:
    preprocess = Preprocessing((SIZE, SIZE), (SIZE, SIZE), (0.5,) * 3, (0.5,) * 3)
    return gradcam.Classifier("colours", model.eval(), preprocess, 6, COLOURS, layer)


def picture(colour: str, size: int = SIZE, *, strength: float = 1.0) -> Tensor:
    """A picture (3,size,size) of one colour, a little brighter from place to place; weak ones are less probable."""
    texture = torch.linspace(0.9, 1, size * size).reshape(1, size, size)
    return SIGNS[COLOURS.index(colour)][:, None, None] * texture * strength
