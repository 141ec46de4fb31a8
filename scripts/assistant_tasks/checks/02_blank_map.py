"""The cause is the saturated softmax, and the map is that of the logit."""

import torch
from common import TASKS, expect_map, expect_unchanged, grad_cam, import_file, make_scene, record_state, run_check
from torch import nn


class Logits(nn.Module):
    """The network without its softmax."""

    def __init__(self, network):
        super().__init__()
        self.features, self.classifier = network.features, network.classifier

    def forward(self, images):
        return self.classifier(self.features(images).mean((2, 3)))


def check(answer):
    model = import_file(TASKS / "02_blank_map/network.py", "network").Network().eval()
    images = torch.cat([make_scene(seed) for seed in (3, 4)])
    with torch.no_grad():
        model.classifier.weight *= 4000
        assert (model(images).max(1).values == 1).all()
    assert answer.CAUSE is not None, "CAUSE is not set"
    assert answer.CAUSE in answer.CAUSES, "CAUSE is not one of CAUSES"
    assert "saturated" in answer.CAUSE, "CAUSE is wrong"
    before = record_state(model)
    maps = answer.explain(model, images)
    expect_unchanged(before, model)
    expect_map(maps, grad_cam(Logits(model), "features", [images], lambda output: output.max(1).values))


if __name__ == "__main__":
    run_check(check)
