"""
Grad-CAM, step by step
======================

Feature maps, their weights, the weighted sum, and the heatmap: each step of Grad-CAM with the numbers of a real model.
The image shows a cat beside an espresso; the explained class is "espresso".
"""

import matplotlib.pyplot as plt
import torch

import gradcam

classifier = gradcam.load_classifier()
image = "assets/cat_and_espresso.jpg"
images = classifier.batch([image])
espresso = classifier.labels.index("espresso")

with gradcam.TargetLayer(classifier.model.get_submodule("layer4")) as layer:
    gradients = layer.backward(classifier.model(images)[0, espresso])
activations, gradients = layer.activations[0].detach(), gradients[0]

weights = gradients.mean((1, 2))
weighted = weights[:, None, None] * activations
evidence = weighted.sum(0)
heatmap = evidence.relu()
strongest = weighted.abs().amax((1, 2)).topk(4).indices

by_package = gradcam.explain(classifier.model, images, "layer4", target=espresso)
print(
    f"{len(weights)} channels; same map as gradcam.explain:", torch.allclose(heatmap, by_package.maps[0, 0], atol=1e-6)
)

figure, axes = plt.subplots(3, 4, figsize=(9, 7.2), constrained_layout=True)
for column, channel in enumerate(strongest):
    axes[0, column].imshow(activations[channel], cmap="viridis")
    axes[0, column].set_title(f"activations of channel {int(channel)}\nweight {weights[channel]:+.4f}", fontsize=9)
    largest = weighted[strongest].abs().max()
    axes[1, column].imshow(weighted[channel], cmap="coolwarm", vmin=-largest, vmax=largest)
    axes[1, column].set_title("activation x weight", fontsize=9)
largest = evidence.abs().max()
explanation = classifier.explain(image, "layer4", target="espresso")
steps = {
    "sum over all channels": {"X": evidence, "cmap": "coolwarm", "vmin": -largest, "vmax": largest},
    "ReLU": {"X": heatmap, "cmap": "turbo"},
    "resized, divided by maximum": {"X": explanation.heatmaps[0, 0], "cmap": "turbo"},
    "drawn on the image": {"X": explanation.overlay()},
}
for axis, (title, drawing) in zip(axes[2], steps.items()):
    axis.imshow(**drawing)
    axis.set_title(title, fontsize=9)
for axis in axes.flat:
    axis.set_axis_off()
figure.savefig("step_by_step.png", dpi=120)
