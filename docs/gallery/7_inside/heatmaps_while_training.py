"""
Heatmaps while training
=======================

A small network learns the colour of a shape. The heatmaps of four images show how it learns to look at the shape.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from gradcam.integrations import HeatmapLogger
from tests.drawn.classifier import make_network, to_images
from tests.drawn.pictures import TRAINING, ShapeSpec, draw_scene


def draw(seed, count, **options):
    """Draw images with a shape in one of four colours, and return the images and the colours."""
    colours = np.arange(count) % 4
    things = ([ShapeSpec(colour=int(colour))] for colour in colours)
    draws = (np.random.default_rng([seed, number]) for number in range(count))
    return np.stack([draw_scene(rng, things=thing, **options).picture for rng, thing in zip(draws, things)]), colours


photos, colours = draw(7, 1000, photographs=TRAINING)
images, classes = to_images(photos), torch.from_numpy(colours)
shown, shown_colours = draw(8, 4)
columns = []
heatmaps = HeatmapLogger(
    to_images(shown),
    originals=shown,
    target=shown_colours,
    sink=lambda overlays, _, step: columns.append((step, overlays)),
)

torch.manual_seed(0)
network = make_network().train()
optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
heatmaps.start(network)
for step in range(1, 601):
    batch = torch.randint(len(images), (25,))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(network(images[batch]), classes[batch]).backward()
    optimizer.step()
    if step in (20, 60, 150, 300, 600):
        heatmaps.draw(network, step)

figure, axes = plt.subplots(4, len(columns), figsize=(9.4, 6.6), layout="constrained")
for column, (step, overlays) in enumerate(columns):
    axes[0, column].set_title(f"step {step}", fontsize=11)
    for row, overlay in enumerate(overlays):
        axes[row, column].imshow(overlay)
        axes[row, column].axis("off")
figure.savefig("steps.png", dpi=130)
