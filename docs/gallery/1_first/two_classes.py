"""
Two classes in one image
========================

Select each class by its name. Each class has its own heatmap.
"""

import gradcam

classifier = gradcam.load_classifier()
explanation = classifier.explain("assets/cat_and_espresso.jpg", target=[["Egyptian cat", "espresso"]])
for k in range(2):
    print(explanation.caption(0, k))
explanation.save("both.png")
