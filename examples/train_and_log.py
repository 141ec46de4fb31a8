"""Train a small classifier and log its Grad-CAM heatmaps after each epoch.

    python examples/train_and_log.py                     photographs in assets/, two classes: animal and thing
    tensorboard --logdir runs                            then open the images gradcam/0 to gradcam/5

To adapt it, change the files and classes in `CLASSES`, and the model in `main`. The heatmaps do not affect the
training: training mode, gradients, running statistics and random states stay as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np
import torch
import torchvision
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

import gradcam
from gradcam.integrations import HeatmapLogger

ASSETS = Path(__file__).parent.parent / "assets"
CLASSES = {"animal": ["koala.webp", "panda.webp", "lemur.webp"], "thing": ["coffee.jpg", "rocket.jpg", "china.jpg"]}
SIZE = 96


def load_data() -> tuple[list[np.ndarray], Tensor, Tensor]:
    """Return photos (H,W,3) to draw on, the model input (N,3,H,W), and the classes (N,)."""
    files = [(ASSETS / name, index) for index, names in enumerate(CLASSES.values()) for name in names]
    pictures = [cv2.resize(gradcam.read_image(file), (SIZE, SIZE)) for file, _ in files]
    images = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255
    return pictures, images, torch.tensor([index for _, index in files])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small classifier and log its Grad-CAM heatmaps.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--log", default="runs")
    typed = parser.parse_args()

    torch.manual_seed(0)
    pictures, images, classes = load_data()
    model = torchvision.models.mobilenet_v3_small(num_classes=len(CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    with SummaryWriter(typed.log) as writer:
        heatmaps = HeatmapLogger(images, "features", target=classes, evidence="signed", originals=pictures, sink=writer)
        heatmaps.start(model)
        for epoch in range(1, 1 + typed.epochs):
            model.train()
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), classes)
            loss.backward()
            optimizer.step()
            writer.add_scalar("loss", loss.item(), epoch)
            heatmaps.after_epoch(model, epoch, epoch)
            print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
