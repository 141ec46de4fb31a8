"""
Record gradients during training
================================

Record gradient statistics at every second step. Recording does not change the training.
"""

import matplotlib.pyplot as plt
import torch
import torchvision

from gradcam import inspection

torch.manual_seed(0)
network = torchvision.models.resnet18(num_classes=4)
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
images, classes = torch.rand(4, 3, 64, 64), torch.arange(4)

with inspection.record(network, "layer*.0.conv1", every=2) as recorder:
    for _ in range(8):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images), classes).backward()
        optimizer.step()

for name, statistics in recorder.gradients.items():
    print(f"{name:16} norm {float(statistics.norm):.4f}")

figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for name in recorder.gradients:
    rows = [row for row in recorder.rows() if row["layer"] == name and row["kind"] == "gradient"]
    axes.semilogy([row["step"] for row in rows], [row["norm"] for row in rows], marker="o", label=name)
axes.set(xlabel="step", ylabel="norm of the gradient")
axes.legend()
figure.savefig("gradients.png")
