"""
Without gradients: Ablation-CAM
===============================

Each channel is taken away in turn, and only the part of the network behind the layer runs again.
"""

import time

import gradcam

classifier = gradcam.load_classifier()
start = time.perf_counter()
explanation = classifier.explain("assets/koala.webp", method="ablationcam")
print(f"{explanation.caption()}, {time.perf_counter() - start:.1f} s")
explanation.save("ablation.png")
