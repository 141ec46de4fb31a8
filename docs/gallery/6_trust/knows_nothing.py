"""
A control map that fails the check
==================================

A control map is a heatmap that does not explain the class. Here, it is always a blob in the centre. This looks
convincing on many photos, but the check detects that the heatmap explains nothing.
"""

import gradcam

classifier = gradcam.load_classifier()
verdict = gradcam.evaluation.check(classifier, "assets/coffee.jpg", method="centre")
print(verdict.outcome)
for test in verdict.tests:
    print(f"{test.name:14} {test.outcome}")
gradcam.write_image("knows_nothing.png", verdict.panel())
