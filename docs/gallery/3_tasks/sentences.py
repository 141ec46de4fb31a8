"""
CLIP-like models: locate a sentence
===================================

Each sentence gets a heatmap. The model has an image encoder and a text encoder. CLIP and SigLIP work the same way.
"""

import numpy as np

import gradcam
from gradcam.targets import Text
from tests import drawn
from tests.drawn.measures import draw_three

matcher = gradcam.load_matcher(drawn.load("convolutional"), size=96, crop=1, mean=[0] * 3, std=[1] * 3)
scene = next(draw_three(5, 1, alike=True))  # some share a shape, some a colour
sentences = [f"a {thing.name}" for thing in scene.things]

large = scene.picture.repeat(3, 0).repeat(3, 1)  # enlarged for display: the model resizes it back
explanation = matcher.explain(large, target=Text(sentences))
print(explanation.method, [f"{sentence.name}: {sentence.score:.2f}" for sentence in explanation.instances[0]])
overlays = [explanation.overlay(0, k) for k in range(len(sentences))]
gradcam.write_image("sentences.png", np.hstack([large, *overlays]))
