"""
Early and late layers
=====================

Finer cells and simpler features towards the input.
"""

import gradcam

classifier = gradcam.load_classifier()
explained = classifier.compare(
    "assets/macaw.webp", layers=["layer2", "layer3", "layer4"], methods=["gradcam", "layercam"]
)
gradcam.write_image("layers.png", gradcam.panel(explained))
