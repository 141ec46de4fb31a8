"""
Exported and quantised models
=============================

An exported program and a dynamically quantised model give nearly the same heatmap as the original.
"""

import numpy as np
import torch

import gradcam

classifier = gradcam.load_classifier()
model, images = classifier.model, classifier.batch([classifier.prepare("assets/koala.webp")])
models = {
    "original": model,
    "exported": torch.export.unflatten(torch.export.export(model, (images,))),
    "quantised": torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8),
}
image = ((images[0] + 1) * 127.5).byte().permute(1, 2, 0).numpy()
panels, maps = [image], []
for name, variant in models.items():
    explanation = gradcam.explain(variant, images, "layer4")
    maps.append(explanation.maps.flatten())
    correlation = torch.corrcoef(torch.stack([maps[0], maps[-1]]))[0, 1]
    print(f"{name:10} class {explanation.classes.item()}, correlation {correlation:.4f}")
    panels.append(gradcam.overlay(image, explanation.heatmaps[0, 0]))
gradcam.write_image("exported.png", np.hstack(panels))
