"""
Explain a missed detection
==========================

Name the box and the class that you expected. The heatmap shows the evidence for candidate boxes that the
detector discarded.
"""

import numpy as np

import gradcam
from gradcam.targets import MissedBox
from tests import drawn
from tests.drawn.pictures import SHAPES, ShapeSpec, draw_scene

detector = gradcam.load_detector(drawn.load("detector"), labels=["nothing", *SHAPES])
star, red = SHAPES.index("star"), 0
scene = draw_scene(np.random.default_rng(7), things=[ShapeSpec(star, red, opacity=0.35)])  # faint
large = scene.picture.repeat(3, 0).repeat(3, 1)  # enlarged for display: the model resizes it back
place = tuple(3 * side for side in scene.things[0].box)

explanation = detector.explain(large, target=MissedBox(place, "star"))
print(
    f"a star at {place} has a score of {explanation.instances[0][0].score:.2f}; boxes begin at {detector.model.score_thresh}"
)
gradcam.write_image("missed.png", np.hstack([large, explanation.overlay()]))
