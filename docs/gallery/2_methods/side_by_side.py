"""
Six CAM methods side by side
============================

The heatmaps of all six methods, for two classes each, come from a single forward pass.
"""

import gradcam

classifier = gradcam.load_classifier()
explanations = classifier.compare(
    "assets/cat_and_espresso.jpg",
    layers=["layer4"],
    methods=["gradcam", "gradcam-pp", "hirescam", "layercam", "finercam", "eigencam"],
    target=[["Egyptian cat", "espresso"]],
)
gradcam.write_image("methods.png", gradcam.panel(explanations))
