"""
Colour maps and opacity
=======================

The same heatmap in four styles.
"""

import numpy as np

import gradcam

classifier = gradcam.load_classifier()
explanation = classifier.explain("assets/rocket.jpg")
looks = [("turbo", 0.5), ("viridis", 0.5), ("magma", 0.7), ("jet", 0.3)]
overlays = [explanation.overlay(colormap=name, alpha=alpha) for name, alpha in looks]
gradcam.write_image("colours.jpg", np.concatenate([np.concatenate(overlays[:2], 1), np.concatenate(overlays[2:], 1)]))
