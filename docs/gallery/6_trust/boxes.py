"""
How much lies on the object?
============================

The energy pointing game: the share of a map's mass inside a box.
"""

import torch

import gradcam
from gradcam.evaluation import energy_pointing_game

classifier = gradcam.load_classifier()
explanation = classifier.explain("assets/coffee.jpg")
box = torch.tensor([[60, 40, 170, 190]])  # left, top, right, bottom, in pixels of what the network saw
masks = torch.zeros(1, 224, 224, dtype=torch.bool)
left, top, right, bottom = box[0].tolist()
masks[0, top:bottom, left:right] = True
share = energy_pointing_game(explanation.heatmaps[:, 0], masks)
print(f"{share.item():.0%} of the map, on {masks.float().mean():.0%} of the picture")
