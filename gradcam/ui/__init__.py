"""The server of `gradcam ui`, which runs the model on images that a local page sends."""
