"""
All of the picture
==================

Most networks see the middle. `fit` shows them all of it, at once or in windows.
"""

import gradcam

classifier = gradcam.load_classifier()
for fit in ("crop", "whole", "tiles"):
    explanation = classifier.explain("assets/china.jpg", fit=fit)
    print(f"{fit:6} {explanation.caption()}")
    explanation.save(f"{fit}.png")
