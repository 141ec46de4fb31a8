"""
Insertion, deletion and ROAD
============================

These three metrics take heatmaps from any library, as tensors.
"""

import matplotlib.pyplot as plt

import gradcam
from gradcam.evaluation import CONTROLS, Subject, deletion, insertion, road

classifier = gradcam.load_classifier()
names = ["koala", "panda"]
images = classifier.batch([classifier.prepare(f"assets/{name}.webp") for name in names])
subject = Subject(classifier.model, images)
target = subject.classes.tolist()

figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for method in ("gradcam", "layercam"):
    heatmaps = gradcam.explain(classifier.model, images, classifier.layer, method=method, target=target).heatmaps
    inserted, deleted = (metric(subject, heatmaps, steps=10) for metric in (insertion, deletion))
    print(f"{method:9} insertion {inserted.areas.mean():.3f} deletion {deleted.areas.mean():.3f}", end=" ")
    print(f"ROAD {road(subject, heatmaps).combined.mean():.3f}")
    axes.plot(inserted.shares, inserted.probabilities.mean(0), label=f"{method}, insertion")
    axes.plot(deleted.shares, deleted.probabilities.mean(0), "--", label=f"{method}, deletion")
axes.set(xlabel="share of the pixels changed", ylabel="probability")
axes.legend()
figure.savefig("curves.png")
print("controls:", ", ".join(CONTROLS))
