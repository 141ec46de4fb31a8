"""
Why this class rather than another?
===================================

The logit of a class minus that of a rival: what is shared by both falls away.
"""

import gradcam
from gradcam.targets import ClassTarget

classifier = gradcam.load_classifier()
panda, bear = classifier.find_class("giant panda"), classifier.find_class("ice bear")

plain = classifier.explain("assets/panda.webp", target=panda)
rather = classifier.explain("assets/panda.webp", target=ClassTarget(panda, score="contrast", against=bear))
plain.save("panda.png")
rather.save("panda_rather_than_bear.png")
