"""
Integrated gradients
====================

The attributions sum to the score of the image minus the score of a baseline image, by default all zeros. The printed
gap is the numerical error: how far the computed sum is from this difference.
"""

import numpy as np

import gradcam

classifier = gradcam.load_classifier()
images = classifier.batch([classifier.prepare("assets/chelsea.jpg")])
for steps in (10, 40):
    attribution = gradcam.attributions.integrated_gradients(classifier.model, images, steps=steps)
    print(f"{steps} steps: score {attribution.scores.item():.2f}, gap {attribution.gaps.item():.3f}")

# %%
# On the left is the image as the model sees it. On the right are the attributions: pixels brighter than grey raise the
# score, and darker pixels lower it.
image = ((images[0] + 1) * 127.5).byte().permute(1, 2, 0).numpy()
gradcam.write_image(
    "integrated.png", np.hstack([image, gradcam.attributions.draw_attribution(attribution.values[0, 0])])
)
