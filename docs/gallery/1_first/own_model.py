"""
Your own model and tensor
=========================

gradcam works with any PyTorch model and its input. This example uses a small network and an image as a tensor.
"""

import torch
from torch import nn

import gradcam

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 5, stride=4),
    nn.ReLU(inplace=True),
    nn.Conv2d(16, 32, 3, stride=2),
    nn.ReLU(inplace=True),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 5),
)
image = gradcam.read_image("assets/astronaut.jpg")
images = torch.from_numpy(image).permute(2, 0, 1)[None] / 255

explanation = gradcam.explain(model, images, target=3)
print(explanation)

# %%
# The weights are random, so the heatmap has no meaning here. With a trained model, you draw the overlay in the same way.
gradcam.write_image("own.png", gradcam.overlay(image, explanation.heatmaps[0, 0]))
