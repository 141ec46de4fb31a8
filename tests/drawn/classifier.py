"""A small classifier of a shape's colour on photographs, trained in a minute, for measurements on many networks.

`scripts/measure_audit` trains it on its own images. `make` is for `scripts/calibrate_check`:

python -m tests.drawn.classifier pictures/ 60
scripts/calibrate_check pictures/ --model tests/drawn/classifier.py:make --size 96
"""

import sys
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from tests.drawn.pictures import TRAINING, ShapeSpec, draw_scene

CLASSES = ("red", "green", "blue", "yellow")  # the first four of COLOURS
EPOCHS, BATCH, RATE = 40, 25, 2e-3
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def make_network() -> nn.Module:
    def block(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    body = [*block(3, 16, 5, 4), *block(16, 32, 3, 2), *block(32, 48, 3, 1)]  # the last layer has a grid of 12 x 12
    return nn.Sequential(nn.Sequential(*body), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, len(CLASSES)))


def train(pictures: np.ndarray, classes: np.ndarray, seed: int) -> nn.Module:
    """Train on images (N,H,W,3), uint8 RGB, and their classes (N,)."""
    torch.manual_seed(seed)
    model, images = make_network().to(memory_format=torch.channels_last), to_images(pictures)
    labels = torch.from_numpy(classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-4)
    steps = EPOCHS * len(images) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in range(EPOCHS):
        for few in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[few]), labels[few]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def to_images(pictures: np.ndarray) -> Tensor:
    """Return the images as the network takes them: (N,3,H,W), normalised."""
    scaled = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(statistic).reshape(3, 1, 1) for statistic in (MEAN, STD))
    return (scaled - mean) / std


def make() -> nn.Module:
    """Train on 2,000 images, drawn on photographs in the public domain."""
    classes = np.arange(2000) % len(CLASSES)
    draws = (np.random.default_rng([7, number]) for number in range(len(classes)))
    pictures = [
        draw_scene(chance, photographs=TRAINING, things=[ShapeSpec(colour=int(class_))]).picture
        for chance, class_ in zip(draws, classes)
    ]
    return train(np.stack(pictures), classes, 0)


def write(folder: Path, count: int) -> None:
    """Write images for the evaluation, drawn on other photographs."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        chance = np.random.default_rng([8, number])
        picture = draw_scene(chance, things=[ShapeSpec(colour=number % len(CLASSES))]).picture
        cv2.imwrite(str(folder / f"{number:03}.png"), picture[..., ::-1])


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
