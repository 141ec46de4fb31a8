"""
Frozen models, training mode, half precision
============================================

Some libraries raise errors for frozen models and for bfloat16 models. Some libraries change a model that is in training
mode. gradcam explains all three kinds of models. The heatmap is the same as for the original model, except for rounding
errors in bfloat16.
"""

import numpy as np
import torch

import gradcam

classifier = gradcam.load_classifier()
model, prepared = classifier.model, classifier.prepare("assets/coffee.jpg")
images = classifier.batch([prepared])
maps = {"original": gradcam.explain(model, images, "layer4").heatmaps}

maps["frozen"] = gradcam.explain(model.requires_grad_(False), images, "layer4").heatmaps
maps["in training"] = gradcam.explain(model.train(), images, "layer4").heatmaps
maps["bfloat16"] = gradcam.explain(model.eval().bfloat16(), images.bfloat16(), "layer4").heatmaps
for name, heatmaps in maps.items():
    pair = torch.stack([maps["original"].flatten(), heatmaps.flatten()])
    print(f"{name:12} correlation {torch.corrcoef(pair)[0, 1]:.4f}")

image = ((images[0] + 1) * 127.5).byte()
gradcam.write_image("four.png", np.hstack([gradcam.overlay(image, heatmaps[0, 0]) for heatmaps in maps.values()]))
