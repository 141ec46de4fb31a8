"""
A control that fails the check
==============================

A heatmap that is always a blob in the centre looks convincing on many photos. The check detects that this heatmap
explains nothing.
"""

import gradcam

classifier = gradcam.load_classifier()
verdict = gradcam.evaluation.check(classifier, "assets/coffee.jpg", method="centre")
print(verdict.outcome)
for test in verdict.tests:
    print(f"{test.name:14} {test.outcome}")
gradcam.write_image("knows_nothing.png", verdict.panel())
