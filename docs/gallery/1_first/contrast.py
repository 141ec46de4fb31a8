"""
Explain one class against another
=================================

The score is the logit of one class minus the logit of another class. Evidence that both classes share cancels out.
"""

import gradcam
from gradcam.targets import ClassTarget

classifier = gradcam.load_classifier()
panda, bear = classifier.find_class("giant panda"), classifier.find_class("ice bear")

plain = classifier.explain("assets/panda.webp", target=panda)
contrast = classifier.explain("assets/panda.webp", target=ClassTarget(panda, score="contrast", against=bear))
plain.save("panda.png")
contrast.save("panda_rather_than_bear.png")
