"""
Segmentation: explain a region
==============================

There are three kinds of targets: a point, a mask of pixels, or the most frequent class that is not the background. A
point selects the region under it. This example uses points.
"""

import numpy as np

import gradcam
from gradcam.targets import Mask
from tests import drawn
from tests.drawn.pictures import SHAPES, draw_scenes

labels = ["background", *SHAPES]
segmenter = gradcam.load_segmenter(drawn.load("segmenter"), labels=labels, size=96, mean=[0] * 3, std=[1] * 3)
scene = next(scene for scene in draw_scenes(7, 20) if len(scene.things) == 4)

large = scene.picture.repeat(3, 0).repeat(3, 1)  # enlarged for display: the model resizes it back

overlays = [large]
for thing in scene.things:
    pixels = np.argwhere(thing.mask)
    down, across = (3 * pixels[len(pixels) // 2]).tolist()
    explanation = segmenter.explain(large, layer="bottleneck", target=Mask(mask=(across, down)))
    print((across, down), explanation.instances[0][0].name)
    overlays.append(explanation.overlay())
gradcam.write_image("masks.png", np.hstack(overlays))
