"""
Watch a training
================

Statistics of gradients at every second step; the training goes the same way as without.
"""

import torch
import torchvision

from gradcam import inspection

torch.manual_seed(0)
network = torchvision.models.resnet18(num_classes=4)
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
images, classes = torch.rand(4, 3, 64, 64), torch.arange(4)

with inspection.record(network, "layer*.0.conv1", every=2) as recorder:
    for _ in range(4):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images), classes).backward()
        optimizer.step()

for name, statistics in recorder.gradients.items():
    print(f"{name:16} norm {float(statistics.norm):.4f}")
