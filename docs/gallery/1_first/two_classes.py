"""
Two things in one picture
=========================

Ask for each class by its name: the map follows the question.
"""

import gradcam

classifier = gradcam.load_classifier()
explanation = classifier.explain("assets/cat_and_espresso.jpg", target=[["Egyptian cat", "espresso"]])
for k in range(2):
    print(explanation.caption(0, k))
explanation.save("both.png")
