"""
Six CAM methods side by side
============================

All heatmaps come from a single pass through the network, for two classes.
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
