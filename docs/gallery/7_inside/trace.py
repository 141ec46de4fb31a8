"""
Every call of every layer
=========================

Shapes, parameters and multiply-adds, in the order of execution.
"""

import torch
import torchvision

from gradcam import inspection

model = torchvision.models.resnet18(weights=None).eval()
trace = inspection.trace(model, torch.zeros(1, 3, 224, 224))
for call in trace.calls[:8]:
    print(call)
print(f"{len(trace.calls)} calls")
