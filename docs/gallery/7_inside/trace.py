"""
Trace every layer call
======================

List the layer calls in the order of execution, with shapes, parameters and multiply-adds.
"""

import matplotlib.pyplot as plt
import torch
import torchvision

from gradcam import inspection

model = torchvision.models.resnet18(weights=None).eval()
trace = inspection.trace(model, torch.zeros(1, 3, 224, 224))
for call in trace.calls[:8]:
    print(call)
print(f"{len(trace.calls)} calls")

convolutions = [call for call in trace.calls if call.type == "Conv2d"]
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
axes.barh([call.name for call in convolutions], [call.multiply_adds / 1e6 for call in convolutions])
axes.invert_yaxis()
axes.set_xlabel("million multiply-adds")
figure.savefig("trace.png")
