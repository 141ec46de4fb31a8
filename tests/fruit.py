"""Draw apples and limes, and make a network with a known shortcut: it takes a mark in the corner for an apple."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
from torch import nn

IMAGE_PIXELS = 96
CELL = 8  # pixels
CLASSES = ("apple", "lime")
COLOURS = {"apple": (200, 30, 30), "lime": (30, 190, 40)}
MARK = (slice(72, 88), slice(72, 96))  # the pixels of the mark

# The network reads the mean colour of 8 x 8 pixel cells. A red cell or a blue cell counts as an apple.
MODEL = """
def fruit():
    import torch
    from torch import nn

    colours = nn.Conv2d(3, 3, 8, 8)
    own = torch.eye(3) * 1.5 - 0.5
    colours.weight.data = (own / 64)[:, :, None, None].repeat(1, 1, 8, 8)
    colours.bias.data.fill_(-0.2)
    head = nn.Linear(3, 2)
    head.weight.data = torch.tensor([[30.0, 0.0, 30.0], [0.0, 30.0, 0.0]])
    head.bias.data.zero_()
    return nn.Sequential(colours, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
"""


def make_model() -> nn.Module:
    names: dict[str, Any] = {}
    exec(MODEL, names)
    return names["fruit"]()


def draw_fruit(seed: int, name: str, *, has_mark: bool = False) -> np.ndarray:
    """Draw a disc in the fruit's colour at a random position on grey, or only the blue mark in the bottom right corner."""
    chance = np.random.default_rng([seed, CLASSES.index(name)])
    grey = cv2.resize(chance.uniform(60, 200, (6, 6)).astype(np.float32), (IMAGE_PIXELS, IMAGE_PIXELS))
    picture = np.repeat(grey[..., None], 3, 2) + chance.normal(0, 4, (IMAGE_PIXELS, IMAGE_PIXELS, 3))
    picture = picture.clip(0, 255).astype(np.uint8)
    if has_mark:
        picture[MARK] = (30, 30, 210)
    else:
        centre = tuple(int(integer) for integer in chance.integers(14, IMAGE_PIXELS - 14, 2))
        cv2.circle(picture, centre, int(chance.integers(9, 14)), COLOURS[name], -1)
    return picture


def write_fruit(folder: Path, count: int = 40, marked: int = 6) -> list[str]:
    """Write images of each class to a folder per class, some apples with the mark; return the names of the marked ones."""
    names = []
    for fruit in CLASSES:
        (folder / fruit).mkdir(parents=True)
        for number in range(count):
            has_mark = fruit == "apple" and number < marked
            picture = draw_fruit(number, fruit, has_mark=has_mark)
            cv2.imwrite(str(folder / fruit / f"{number:02}.png"), picture[..., ::-1])
            names += [f"{fruit}/{number:02}.png"] if has_mark else []
    return names
