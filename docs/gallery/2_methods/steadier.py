"""
Less noise with flips and scales
================================

The second heatmap is the mean over six views in one batch: three views of the image and three views of its mirror
image. In the three views, the values are multiplied by 1, by 0.9 or by 1.1.
"""

import gradcam

classifier = gradcam.load_classifier()
plain = classifier.explain("assets/lemur.webp")
steady = classifier.explain("assets/lemur.webp", augmentation="flip-scale")
plain.save("plain.png")
steady.save("steady.png")
