"""
A vision transformer
====================

The model is a vision transformer with a linear head. The classes are six shapes and eight colours. The token grid is
detected automatically. Each row has three heatmaps: one for the colour of each object in the scene. The rows are
Grad-CAM at an intermediate block, gradient rollout, and attention rollout. Attention rollout is class-agnostic: its
heatmap is the same for each colour.
"""

import numpy as np
import torch

import gradcam
from tests import drawn
from tests.drawn.heads import PROPERTIES, draw_training_scenes, fit_head, list_properties
from tests.drawn.measures import draw_three
from tests.drawn.pictures import to_images

model, scenes = drawn.load("transformer").visual, draw_training_scenes()
model.heads = torch.nn.Identity()
model.heads = fit_head(model, scenes, list_properties(scenes))

scene = next(draw_three(6, 1, alike=False))
colours = [thing.name.split()[0] for thing in scene.things]
classes = [PROPERTIES.index(colour) for colour in colours]
large = scene.picture.repeat(3, 0).repeat(3, 1)  # enlarged for display
layers = {"gradcam": "encoder.layers.encoder_layer_1.ln_1", "gradient-rollout": None, "rollout": None}
rows = []
for method, layer in layers.items():
    explanation = gradcam.explain(model, to_images([scene]), layer, method=method, target=[classes])
    print(f"{method:16}", explanation.layer, colours, tuple(explanation.maps.shape))
    overlays = [gradcam.overlay(large, heatmap, region=(0, 0, 288, 288)) for heatmap in explanation.heatmaps[0]]
    rows.append(np.hstack([large, *overlays]))
gradcam.write_image("transformer.png", np.vstack(rows))
