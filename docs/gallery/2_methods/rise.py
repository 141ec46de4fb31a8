"""
A model as a black box: RISE
============================

RISE hides random parts of the image and weights each mask by the score of the masked image.
This example uses 300 masks; the paper uses 4000.
"""

import gradcam

classifier = gradcam.load_classifier()
rise = gradcam.METHODS["rise"].using(masks=300, seed=0)
explanation = classifier.explain("assets/coffee.jpg", method=rise)
explanation.save("rise.png")
