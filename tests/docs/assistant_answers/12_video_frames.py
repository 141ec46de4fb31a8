from torch import nn

import gradcam


class ChannelsFirst(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, clips):
        return self.model(clips.transpose(1, 2))


def explain(model, clip, target, path):
    explanation = gradcam.explain(ChannelsFirst(model), clip.transpose(1, 2), "model.features", target=target)
    heatmap = explanation.heatmaps[0, 0]
    number = int(heatmap.mean((1, 2)).argmax())
    frame = (clip[0, number] * 255).byte().permute(1, 2, 0).numpy()
    gradcam.write_image(path, gradcam.overlay(frame, heatmap[number]))
    return explanation.maps[0, 0], number
