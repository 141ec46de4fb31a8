"""
Explain a regression model
==========================

Without a target, a single output (N,1) is the score. The heatmap shows evidence of both signs.
"""

import torch
import torchvision

import gradcam

torch.manual_seed(0)
model = torchvision.models.resnet18(weights=None, num_classes=1).eval()
image = gradcam.read_image("assets/astronaut.jpg")
images = torch.from_numpy(image).permute(2, 0, 1)[None] / 255

explanation = gradcam.explain(model, images, "layer4", evidence="signed")
print(f"output: {explanation.output.item():.3f}")
gradcam.write_image("regression.png", gradcam.overlay(image, explanation.heatmaps[0, 0], signed=True))
