"""The maps equal plain autograd with both inputs, one class per image."""

import torch
from common import expect_map, expect_unchanged, grad_cam, make_scene, pick, record_state, run_check
from torch import nn


class TwoInputs(nn.Module):
    """A classifier of images, whose channels are scaled by measurements."""

    def __init__(self):
        super().__init__()
        self.table = nn.Sequential(nn.Linear(4, 16), nn.Sigmoid())
        self.features = nn.Sequential(nn.Conv2d(3, 16, 5, 4, 2), nn.ReLU())
        self.head = nn.Linear(16, 5)

    def forward(self, measurements, image):
        return self.head(self.features(image).mean((2, 3)) * self.table(measurements))


def check(answer):
    model = TwoInputs().eval()
    images = torch.cat([make_scene(seed) for seed in (50, 51, 52)])
    measurements = torch.randn(3, 4)
    with torch.no_grad():
        logits = model(measurements, images)
    before = record_state(model)
    maps, received = answer.explain(model, measurements, images, [4, 0, 2])
    expect_unchanged(before, model)
    torch.testing.assert_close(torch.as_tensor(received).detach(), logits, msg="the logits are wrong")
    expect_map(maps, grad_cam(model, "features", [measurements, images], pick([4, 0, 2])))


if __name__ == "__main__":
    run_check(check)
