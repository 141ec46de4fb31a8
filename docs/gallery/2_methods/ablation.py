"""
Without gradients: Ablation-CAM
===============================

Ablation-CAM removes one channel at a time. Only the part of the network after the layer runs again.
"""

import time

import gradcam

classifier = gradcam.load_classifier()
start = time.perf_counter()
explanation = classifier.explain("assets/koala.webp", method="ablationcam")
print(f"{explanation.caption()}, {time.perf_counter() - start:.1f} s")
explanation.save("ablation.png")
