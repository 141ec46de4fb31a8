"""
Object detection: explain each box
==================================

Each detection gets a heatmap. All heatmaps come from one forward pass.
Detectors from torchvision, Hugging Face and your own code work the same way.
"""

import gradcam
from gradcam.targets import Box
from tests import drawn
from tests.drawn.pictures import SHAPES, draw_scenes

detector = gradcam.load_detector(drawn.load("detector"), labels=["nothing", *SHAPES])
small = next(scene.picture for scene in draw_scenes(5, 20) if len(scene.things) == 4)
image = small.repeat(3, 0).repeat(3, 1)  # enlarged for display: the model resizes it back

explanations = detector.compare(image, methods=["hirescam"], target=Box(all))
(explanation,) = explanations.values()
for box in explanation.instances[0]:
    print(box.number, box.name, f"{100 * box.score:.0f} %", [round(side) for side in box.box])
gradcam.write_image("boxes.png", gradcam.panel(explanations, height=288))

# %%
# Eigen-CAM is class-agnostic: it gives the same heatmap for every box.
explanations = detector.compare(image, methods=["eigencam"], target=Box(all))
gradcam.write_image("eigencam.png", gradcam.panel(explanations, height=288))
