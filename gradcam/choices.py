"""What there is to choose from beside methods and scores: the tables that Python checks against and the shell offers."""

# No torch is imported here: the shell reads these before there is anything to compute.

from __future__ import annotations

EVIDENCE = ("positive", "negative", "signed")
SMOOTHINGS = ("none", "eigen")

# How a layer's output may lie: (N,C,h,w), (N,h,w,C), (N,T,D) and (T,N,D).
LAYOUTS = ("channels first", "channels last", "tokens", "tokens first")

# How logits become probabilities: together (softmax), each for itself (sigmoid), or not at all, since they are
# probabilities. "auto" is softmax, or sigmoid for a single logit.
ACTIVATIONS = ("auto", "softmax", "sigmoid", "none")

# The views of an image that are explained together: what it is multiplied by, and whether it is mirrored. The first is
# the image.
AUGMENTATIONS: dict[str, tuple[tuple[float, bool], ...]] = {
    "none": ((1.0, False),),
    "flip": ((1.0, False), (1.0, True)),
    "flip-scale": tuple((factor, mirrored) for mirrored in (False, True) for factor in (1.0, 0.9, 1.1)),
}

# Which channels of a layer come first, and what each one's largest value is measured by.
CHANNEL_ORDERS = ("strongest", "index")
CHANNEL_SCALES = ("channel", "layer")

# What `gradcam batch` writes of a picture, and as what.
SAVED = {
    "overlay": "the heatmap on the picture",
    "heatmap": "the heatmap alone",
    "map": "the method's own values, float32 (h,w), as .npy",
    "panel": "methods, layers and classes side by side",
}
FORMATS = ("jpg", "png", "webp")
OUTPUT_FORMATS = ("files", "webdataset")  # of what is written: a file each, or samples in tars
