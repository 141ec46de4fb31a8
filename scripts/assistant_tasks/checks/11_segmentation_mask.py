"""Values and maps equal plain autograd of the mean logit over the box."""

import torch
from common import differentiate, expect_map, expect_unchanged, make_scene, record_state, run_check
from torch import nn


class Segmenter(nn.Module):
    """Three classes per pixel, from a grid of a quarter of the image's size."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 12, 5, 2, 2), nn.ReLU(), nn.Conv2d(12, 16, 3, 2, 1), nn.ReLU(inplace=True)
        )
        self.context = nn.Conv2d(16, 16, 5, padding=2)
        self.decoder = nn.Conv2d(16, 3, 1)

    def forward(self, images):
        logits = self.decoder(self.context(self.encoder(images)).relu())
        return nn.functional.interpolate(logits, images.shape[2:], mode="bilinear")


def check(answer):
    model = Segmenter().eval()
    images = torch.cat([make_scene(seed, (64, 80)) for seed in (30, 31)])
    before = record_state(model)
    values, maps = answer.explain(model, images, (8, 20, 40, 60), 2)
    expect_unchanged(before, model)
    score = lambda output: output[:, 2, 20:60, 8:40].mean((1, 2))  # noqa: E731
    activations, gradient, expected = differentiate(model, "encoder", [images], score)
    received = torch.as_tensor(values).detach()
    assert received.shape == (2,), f"the values have the shape {tuple(received.shape)}"
    torch.testing.assert_close(received, expected, msg="the values are not the mean logits in the box")
    expect_map(maps, (activations * gradient).sum(1).relu())


if __name__ == "__main__":
    run_check(check)
