import gradcam


def explain(model, measurements, images, targets):
    inputs = {"measurements": measurements, "image": images}
    explanation = gradcam.explain(model, inputs, "features", target=targets)
    return explanation.maps[:, 0], explanation.output
