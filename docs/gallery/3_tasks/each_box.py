"""
Boxes: why is each one here?
============================

A map for each box of a detector, all from one pass; torchvision's, Hugging Face's and those of your own go the same way.
"""

import gradcam
from gradcam.targets import Box
from tests import drawn
from tests.drawn.pictures import SHAPES, draw_scenes

detector = gradcam.load_detector(drawn.load("detector"), labels=["nothing", *SHAPES])
small = next(it.picture for it in draw_scenes(5, 20) if len(it.things) == 4)
picture = small.repeat(3, 0).repeat(3, 1)  # for people: the network sees it as small as it was

found = detector.compare(picture, methods=["hirescam"], target=Box(all))
(explanation,) = found.values()
for it in explanation.instances[0]:
    print(it.number, it.name, f"{it.score:.0%}", [round(side) for side in it.box])
gradcam.write_image("boxes.png", gradcam.panel(found, height=288))

# %%
# A method that knows no box gives the same map for each of them.
found = detector.compare(picture, methods=["eigencam"], target=Box(all))
gradcam.write_image("eigencam.png", gradcam.panel(found, height=288))
