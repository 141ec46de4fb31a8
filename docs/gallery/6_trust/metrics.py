"""
Insertion, deletion and ROAD
============================

Metrics are functions of heatmaps, of whichever library.
"""

import gradcam
from gradcam.evaluation import CONTROLS, Subject, deletion, insertion, road

classifier = gradcam.load_classifier()
names = ["koala", "panda"]
images = classifier.batch([classifier.prepare(f"assets/{name}.webp") for name in names])
subject = Subject(classifier.model, images)
target = subject.classes.tolist()

for method in ("gradcam", "layercam"):
    heatmaps = gradcam.explain(classifier.model, images, classifier.layer, method=method, target=target).heatmaps
    print(
        f"{method:9} insertion {insertion(subject, heatmaps, steps=10).areas.mean():.3f} "
        f"deletion {deletion(subject, heatmaps, steps=10).areas.mean():.3f} "
        f"ROAD {road(subject, heatmaps).combined.mean():.3f}"
    )
print("controls:", ", ".join(CONTROLS))
