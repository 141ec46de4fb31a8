"""Patterns for the full names of model classes."""

MODELING = r"transformers\.models\.\w+\.modeling_\w+\."
BACKBONES = rf"{MODELING}(?!\w*PreTrained|VisionEncoderDecoder)\w*(Model|ModelWithProjection|Backbone)"


# The torchvision module whose transform resizes and pads images inside a detector. If it was not imported, no model has
# such a transform.
DETECTION_TRANSFORM_MODULE = "torchvision.models.detection.transform"
