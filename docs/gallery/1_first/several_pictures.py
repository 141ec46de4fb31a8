"""
Explain a batch of images
=========================

All images of a batch share one forward pass. Each image is explained for its own top class.
"""

import gradcam

classifier = gradcam.load_classifier()
names = ["koala", "panda", "macaw", "lemur"]
explanation = classifier.explain([f"assets/{name}.webp" for name in names])
for i, name in enumerate(names):
    print(f"{name:8} {explanation.caption(i)}")
explanation.save("four.png")
