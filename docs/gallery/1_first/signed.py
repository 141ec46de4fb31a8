"""
Evidence for and against a class
================================

In a signed heatmap, red marks evidence for the class, and blue marks evidence against the class.
"""

import gradcam

classifier = gradcam.load_classifier()
explanation = classifier.explain("assets/cat_and_espresso.jpg", target="espresso", method="hirescam", evidence="signed")
print(f"{explanation.heatmaps.min():.2f} to {explanation.heatmaps.max():.2f}")
explanation.save("signed.png")
