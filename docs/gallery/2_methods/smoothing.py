"""
Eigen-smoothing
===============

Eigen-smoothing replaces the sum of the weighted channels with their first principal component.
"""

import gradcam

classifier = gradcam.load_classifier()
for name, smoothing in {"sum": "none", "component": "eigen"}.items():
    explanation = classifier.explain("assets/crocodile.webp", smoothing=smoothing)
    explanation.save(f"{name}.png")
