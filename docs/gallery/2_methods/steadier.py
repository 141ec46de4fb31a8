"""
Steadier maps: flips and scales
===============================

The mean over the mirrored picture and over two more scales, in one batch.
"""

import gradcam

classifier = gradcam.load_classifier()
plain = classifier.explain("assets/lemur.webp")
steady = classifier.explain("assets/lemur.webp", augmentation="flip-scale")
plain.save("plain.png")
steady.save("steady.png")
