"""
Integrated gradients
====================

The attributions sum to the score of the image minus the score of the baseline. The printed
gap is the numerical error: how far the computed sum is from this difference.
"""

import gradcam

classifier = gradcam.load_classifier()
images = classifier.batch([classifier.prepare("assets/flower.jpg")])
for steps in (10, 40):
    attribution = gradcam.attributions.integrated_gradients(classifier.model, images, steps=steps)
    print(f"{steps} steps: score {attribution.scores.item():.2f}, gap {attribution.gaps.item():.3f}")
gradcam.write_image("integrated.png", gradcam.attributions.draw_attribution(attribution.values[0, 0]))
