"""
A model as a black box: RISE
============================

Random masks over the picture, weighted by the score that is left. 300 masks here, 4000 in the paper.
"""

import gradcam

classifier = gradcam.load_classifier()
rise = gradcam.METHODS["rise"].using(masks=300, seed=0)
explanation = classifier.explain("assets/coffee.jpg", method=rise)
explanation.save("rise.png")
