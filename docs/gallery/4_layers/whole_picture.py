"""
Explain the whole image
=======================

Most classifiers see a centre crop. With `fit`, the model sees the whole image, either resized or in tiles.
"""

import gradcam

classifier = gradcam.load_classifier()
for fit in ("crop", "whole", "tiles"):
    explanation = classifier.explain("assets/china.jpg", fit=fit)
    print(f"{fit:6} {explanation.caption()}")
    explanation.save(f"{fit}.png")
