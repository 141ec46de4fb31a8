"""
Less noise with flips and scales
================================

The second heatmap is the mean over six views in one batch. The views are the image and its mirror image, each with
its values multiplied by 1, 0.9 and 1.1.
"""

import gradcam

classifier = gradcam.load_classifier()
plain = classifier.explain("assets/lemur.webp")
steady = classifier.explain("assets/lemur.webp", augmentation="flip-scale")
plain.save("plain.png")
steady.save("steady.png")
