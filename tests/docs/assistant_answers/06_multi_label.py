import torch

import gradcam


def explain(model, image, labels):
    with torch.no_grad():
        probabilities = model(image[None]).sigmoid()[0]
    present = [i for i in range(len(labels)) if probabilities[i] >= 0.5]
    explanation = gradcam.explain(model, image[None], "features", target=[present])
    return {labels[c]: (float(probabilities[c]), explanation.maps[0, k]) for k, c in enumerate(present)}
