"""
Volumes and video
=================

A video clip of eight frames gives a heatmap for each of the eight frames.
"""

import numpy as np
import torch
from torchvision.models.video import r3d_18

import gradcam

torch.manual_seed(0)
image = gradcam.read_image("assets/rocket.jpg")[:256, :256]
frames = np.stack([np.roll(image, 12 * step, axis=0) for step in range(8)])
clip = torch.from_numpy(frames).permute(3, 0, 1, 2)[None] / 255

explanation = gradcam.explain(r3d_18(weights=None).eval(), clip, target=5)
print(tuple(explanation.maps.shape), tuple(explanation.heatmaps.shape))
row = [gradcam.overlay(frames[step], explanation.heatmaps[0, 0, step]) for step in (0, 3, 6)]
gradcam.write_image("frames.png", np.concatenate(row, axis=1))
