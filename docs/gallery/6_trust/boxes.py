"""
Energy pointing game: how much of the heatmap is on the object?
===============================================================

The energy pointing game measures the share of the heatmap that is inside a box.
"""

import cv2
import torch

import gradcam
from gradcam.evaluation import energy_pointing_game

classifier = gradcam.load_classifier()
images = classifier.batch([classifier.prepare("assets/coffee.jpg")])
heatmaps = gradcam.explain(classifier.model, images, "layer4").heatmaps[:, 0]
left, top, right, bottom = 22, 5, 205, 115  # the cup, in pixels of the model's input
masks = torch.zeros(1, 224, 224, dtype=torch.bool)
masks[0, top:bottom, left:right] = True
share = energy_pointing_game(heatmaps, masks)
print(f"{100 * share.item():.0f} % of the heatmap, on {100 * masks.float().mean():.0f} % of the image")

image = ((images[0] + 1) * 127.5).byte()
overlay = gradcam.overlay(image, heatmaps[0])
gradcam.write_image("box.png", cv2.rectangle(overlay, (left, top), (right, bottom), (255, 255, 255), 2))
