"""A network for six colours with known maps: the evidence for a class is where its colour is."""

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
    """A model that maps colours in [-1,1] to logits: the mean excess of a colour's channel over all other colours.

    At `colour` and `active`, the map of a class is where the colour is; at `turn`, it is in the opposite cell.
    """

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
    """Return an image (3,size,size) of one colour with slight variations in brightness; weak images are less probable."""
    texture = torch.linspace(0.9, 1, size * size).reshape(1, size, size)
    return SIGNS[COLOURS.index(colour)][:, None, None] * texture * strength
