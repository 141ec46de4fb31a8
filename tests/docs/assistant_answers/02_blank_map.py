from torch import nn

import gradcam

CAUSES = ["the probability is saturated, so its gradient is zero"]
CAUSE = CAUSES[0]


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model.classifier(self.model.features(images).mean((2, 3)))


def explain(model, images):
    return gradcam.explain(Logits(model), images, "model.features").maps[:, 0]
