"""
Swin Transformer: channels last
===============================

Layers with output (N,h,w,C) are recognised, too. The model is torchvision's Swin Transformer, trained to predict which
shapes and colours are in an image. Each heatmap explains one colour. The default layer has 6 x 6 cells.
"""

import numpy as np

import gradcam
from tests import drawn
from tests.drawn.heads import PROPERTIES
from tests.drawn.measures import draw_three
from tests.drawn.pictures import to_images

model = drawn.load("swin")
scenes = [next(draw_three(seed, 1, alike=False)) for seed in (10, 11)]
colours = [[thing.name.split()[0] for thing in scene.things] for scene in scenes]
classes = [[PROPERTIES.index(colour) for colour in row] for row in colours]

explanation = gradcam.explain(model, to_images(scenes), target=classes)
print(explanation.layer, tuple(explanation.maps.shape))
rows = []
for scene, heatmaps in zip(scenes, explanation.heatmaps):
    large = scene.picture.repeat(3, 0).repeat(3, 1)  # enlarged for display
    rows.append(np.hstack([large, *(gradcam.overlay(large, heatmap, region=(0, 0, 288, 288)) for heatmap in heatmaps)]))
print(colours)
gradcam.write_image("swin.png", np.vstack(rows))
