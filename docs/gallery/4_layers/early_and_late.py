"""
Early and deep layers
=====================

Earlier layers have finer grids and simpler features.
"""

import gradcam

classifier = gradcam.load_classifier()
explanations = classifier.compare(
    "assets/macaw.webp", layers=["layer2", "layer3", "layer4"], methods=["gradcam", "layercam"]
)
gradcam.write_image("layers.png", gradcam.panel(explanations))
