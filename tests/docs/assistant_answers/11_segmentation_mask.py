import gradcam
from gradcam.targets import Mask


def explain(model, images, box, target):
    explanation = gradcam.explain(model, images, "encoder", target=Mask(target, box))
    return explanation.scores[:, 0], explanation.maps[:, 0]
