"""
U-Net: explain a region
=======================

The score is the mean logit of a class over a region. Any function of the output can be the target. The heatmaps
are computed at the end of the encoder. They show which parts of the image affect the logits in the region.
"""

import numpy as np
import torch

import gradcam
from tests import drawn
from tests.drawn.pictures import SHAPES, draw_scenes, to_images

unet = drawn.load("segmenter")
scene = next(scene for scene in draw_scenes(7, 20) if len(scene.things) == 4)
large = scene.picture.repeat(3, 0).repeat(3, 1)  # enlarged for display
images = [large]
for thing in scene.things[:3]:
    mask, label = torch.from_numpy(thing.mask), 1 + thing.shape

    def mean_logit(output, mask=mask, label=label):
        return (output[:, label] * mask).sum((1, 2)) / mask.sum()

    explanation = gradcam.explain(unet, to_images([scene]), "bottleneck", target=mean_logit)
    print(f"{SHAPES[thing.shape]:8} {explanation.method}, score {explanation.scores.item():.1f}")
    images.append(gradcam.overlay(large, explanation.heatmaps[0, 0], region=(0, 0, 288, 288)))
gradcam.write_image("region.png", np.hstack(images))
