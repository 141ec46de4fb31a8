"""Maps of three methods equal plain autograd, from few runs of the frozen model, without pytorch-grad-cam."""

import sys

import torch
from common import (
    SmallNet,
    differentiate,
    expect_map,
    expect_unchanged,
    make_scene,
    pick,
    record_state,
    run_check,
    weigh_channels,
)  # fmt: skip


def check(answer):
    model = SmallNet(5, seed=9).eval().requires_grad_(False)
    images, classes = torch.cat([make_scene(seed) for seed in (70, 71)]), [3, 1]
    score = lambda output: pick(classes)(output) - output[:, 0]  # noqa: E731
    inputs = images.clone().requires_grad_()
    activations, gradient, _ = differentiate(model, "features", [inputs], score)
    expected = {
        "gradcam": weigh_channels(activations, gradient).relu(),
        "hirescam": (activations * gradient).sum(1).relu(),
        "layercam": (activations * gradient.relu()).sum(1).relu(),
    }
    before = record_state(model)
    runs = []
    forward = model.forward
    model.forward = lambda given: (runs.append(len(given)), forward(given))[1]
    received = answer.compare(model, images, classes)
    del model.forward
    expect_unchanged(before, model)
    assert set(received) == set(expected), f"the methods are {sorted(received)}"
    for name, maps in expected.items():
        expect_map(received[name], maps, f"map of {name}")
    assert sum(runs) <= 2 * len(images), f"the model ran on {sum(runs)} images for {len(images)} images"


if __name__ == "__main__":
    sys.modules["pytorch_grad_cam"] = None  # importing it is an error
    run_check(check)
