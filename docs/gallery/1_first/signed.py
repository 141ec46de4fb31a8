"""
For and against
===============

Both signs in one picture: red speaks for the class, blue against it.
"""

import gradcam

classifier = gradcam.load_classifier()
explanation = classifier.explain("assets/cat_and_espresso.jpg", target="espresso", method="hirescam", evidence="signed")
print(f"{explanation.heatmaps.min():.2f} to {explanation.heatmaps.max():.2f}")
explanation.save("signed.png")
