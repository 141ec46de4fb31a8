"""
Explain a regression model
==========================

The model estimates which share of an image is covered by shapes. If the model has a single output (N,1) and you pass no
target, the output is the score. Red areas raise the estimate, and blue areas lower it.
"""

import numpy as np
import torch

import gradcam
from tests.drawn.heads import draw_training_scenes, fit_head, load_encoder
from tests.drawn.pictures import draw_scenes, to_images

# %%
# The model is a trained encoder, with a linear layer that is fitted by least squares.
encoder, training_scenes = load_encoder(), draw_training_scenes()
areas = [[100 * sum(thing.mask.mean() for thing in scene.things)] for scene in training_scenes]  # per cent
model = torch.nn.Sequential(encoder, fit_head(encoder, training_scenes, torch.tensor(areas)))

# %%
# Explain four new images in one batch.
scenes = [next(scene for scene in draw_scenes(5, 60) if len(scene.things) == count) for count in (1, 2, 3, 4)]
explanation = gradcam.explain(model, to_images(scenes), evidence="signed")
columns = []
for scene, output, heatmaps in zip(scenes, explanation.output, explanation.heatmaps):
    covered = 100 * sum(thing.mask.mean() for thing in scene.things)
    print(f"shapes cover {covered:4.1f} %, estimate {output.item():4.1f} %")
    large = scene.picture.repeat(2, 0).repeat(2, 1)  # enlarged for display
    columns.append(np.vstack([large, gradcam.overlay(large, heatmaps[0], signed=True, region=(0, 0, 192, 192))]))
gradcam.write_image("regression.png", np.hstack(columns))
