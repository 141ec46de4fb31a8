"""
A first heatmap
===============

Explain the top class of a photo with the embedded classifier.
"""

import gradcam

classifier = gradcam.load_classifier()
explanation = classifier.explain("assets/coffee.jpg")
print(explanation.caption())

# %%
# A thin line outlines the part of the image that the model saw; the overlay covers this part.
explanation.save("coffee.png")
