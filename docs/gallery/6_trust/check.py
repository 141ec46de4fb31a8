"""
A verdict
=========

Four tests that a map can fail, on one picture.
"""

import gradcam

classifier = gradcam.load_classifier()
verdict = gradcam.evaluation.check(classifier, "assets/coffee.jpg")
print(verdict.outcome)
for test in verdict.tests:
    print(f"{test.name:14} {test.outcome:9} {test.value:6.3f}  {test.reason}")
gradcam.write_image("check.png", verdict.panel())
