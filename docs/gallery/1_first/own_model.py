"""
Your own model and tensor
=========================

gradcam works with any PyTorch model and its input. This example trains a small network in a few seconds to name the
colour of a shape. It then explains an image, which is passed as a tensor.
"""

import numpy as np
import torch
from torch import nn

import gradcam
from tests.drawn.pictures import TRAINING, ShapeSpec, draw_scene, to_images

COLOURS = ("red", "green", "blue", "yellow")

# %%
# Train your model as usual.
classes = torch.arange(400) % len(COLOURS)
scenes = [
    draw_scene(np.random.default_rng([1, number]), photographs=TRAINING, things=[ShapeSpec(colour=int(label))])
    for number, label in enumerate(classes)
]
images = to_images(scenes)

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(3, 16, 5, stride=4, padding=2), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
    *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True)),
    *(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(32, len(COLOURS))),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
for _ in range(12):
    for rows in torch.randperm(len(images)).split(25):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), classes[rows]).backward()
        optimizer.step()

# %%
# Explain two classes of a new image. It contains a red shape and a blue shape.
scene = draw_scene(np.random.default_rng(0), things=[ShapeSpec(colour=0), ShapeSpec(colour=2)])
explanation = gradcam.explain(model, to_images([scene]), target=[[0, 2]])
print(explanation)
large = scene.picture.repeat(3, 0).repeat(3, 1)  # enlarged for display
overlays = [gradcam.overlay(large, heatmap, region=(0, 0, 288, 288)) for heatmap in explanation.heatmaps[0]]
gradcam.write_image("own.png", np.hstack([large, *overlays]))
