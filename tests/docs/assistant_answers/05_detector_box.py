import gradcam
from gradcam.targets import Box


def explain(detector, image):
    explanation = gradcam.explain(detector, [image], "backbone.features.0", target=Box(1))
    detection = explanation.instances[0][0]
    return {"box": detection.box, "score": detection.score, "map": explanation.maps[0, 0]}
