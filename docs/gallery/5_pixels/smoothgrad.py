"""
SmoothGrad
==========

Input gradients, averaged over noisy copies of the image.
"""

import gradcam

classifier = gradcam.load_classifier()
images = classifier.batch([classifier.prepare("assets/flower.jpg")])
for samples in (1, 25):
    attribution = gradcam.attributions.smoothgrad(classifier.model, images, samples=samples, noise=0.15)
    gradcam.write_image(f"smooth_{samples:02}.png", gradcam.attributions.draw_attribution(attribution.values[0, 0]))
