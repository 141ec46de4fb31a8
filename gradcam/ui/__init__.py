"""The server of `gradcam ui`: a local page sends images and questions, and the server runs the model."""
