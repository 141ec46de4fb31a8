"""
The first principal component
=============================

Eigen-smoothing takes the strongest component of the weighted channels in place of their sum.
"""

import gradcam

classifier = gradcam.load_classifier()
for name, smoothing in {"sum": "none", "component": "eigen"}.items():
    explanation = classifier.explain("assets/crocodile.webp", smoothing=smoothing)
    explanation.save(f"{name}.png")
