"""
Check a heatmap
===============

Run five tests of a heatmap, and compare it with control maps: heatmaps that do not explain the class.
"""

import gradcam

classifier = gradcam.load_classifier()
verdict = gradcam.evaluation.check(classifier, "assets/coffee.jpg")
print(verdict.outcome)
for test in verdict.tests:
    print(f"{test.name:14} {test.outcome:9} {test.value:6.3f}  {test.reason}")
for control in verdict.controls:
    print(
        f"{control.name:16} {control.effect:6.2f}  {'distinguished' if control.is_distinguished else 'not distinguished'}"
    )
gradcam.write_image("check.png", verdict.panel())
