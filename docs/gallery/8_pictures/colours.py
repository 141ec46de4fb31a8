"""
Colour maps and opacity
=======================

The six images show the same heatmap. The top row has the default (inferno on grey), turbo on grey, and viridis on grey.
The bottom row has turbo on the colour image, jet on the colour image with a uniform opacity, and cividis on grey.
"""

import numpy as np

import gradcam

classifier = gradcam.load_classifier()
explanation = classifier.explain("assets/cat_and_espresso.jpg", target="espresso")
looks = [{}, {"colormap": "turbo"}, {"colormap": "viridis"}]
looks += [{"base": "color"}, {"base": "color", "blend": "uniform", "colormap": "jet"}, {"colormap": "cividis"}]
overlays = [explanation.overlay(**look) for look in looks]
gradcam.write_image("colours.jpg", np.concatenate([np.concatenate(overlays[:3], 1), np.concatenate(overlays[3:], 1)]))
