"""
A first picture
===============

The top class of a photograph, with the small classifier that comes with the package.
"""

import gradcam

classifier = gradcam.load_classifier()
explanation = classifier.explain("assets/coffee.jpg")
print(explanation.caption())

# %%
# The overlay lies on the pixels that the network saw, which a fine line shows.
explanation.save("coffee.png")
