"""
Find vanishing gradients
========================

Compute the gradient of a class score at every layer. Print the first six layers, and plot all layers.
"""

import gradcam
from gradcam import inspection

classifier = gradcam.load_classifier()
images = classifier.batch([classifier.prepare("assets/coffee.jpg")])
flow = inspection.gradients(classifier.model, images, target=967)
for layer in flow.layers[:6]:
    print(layer)
gradcam.write_image("flow.png", inspection.draw_gradients(flow))
