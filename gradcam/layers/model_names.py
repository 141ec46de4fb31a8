"""Patterns for the full names of model classes."""

MODELING = r"transformers\.models\.\w+\.modeling_\w+\."
BACKBONES = rf"{MODELING}(?!\w*PreTrained|VisionEncoderDecoder)\w*(Model|ModelWithProjection|Backbone)"


# This module resizes and pads a list of images inside the model. The module matters only if it has been imported.
DETECTION_TRANSFORM_MODULE = "torchvision.models.detection.transform"
