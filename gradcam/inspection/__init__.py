"""Inspect a model: record and edit its activations and gradients, with hooks that leave no trace.

features = gradcam.inspection.features(model, images, ["layer4", "avgpool"])

with gradcam.inspection.record(model, "layer*.conv1") as recorder:
    ...  # a step of training, or an epoch
"""

from gradcam.lazy import export_lazily

__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)
