import gradcam

CAUSES = ["the layer comes after the pooling, so its output has one cell and no places"]
CAUSE = CAUSES[0]
LAYER = "neck"


def explain(model, images, target):
    return gradcam.explain(model, images, LAYER, target=target).maps[:, 0]
