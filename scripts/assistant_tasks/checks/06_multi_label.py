"""The findings, probabilities and maps are those of the sigmoid and of plain autograd; at most two runs of the model."""

import torch
from common import SmallNet, expect_map, expect_unchanged, grad_cam, make_scene, pick, record_state, run_check


def check(answer):
    model = SmallNet(8, seed=3).eval()
    with torch.no_grad():
        model.head.weight *= 6
    labels = ["atelectasis", "effusion", "mass", "nodule", "pneumonia", "oedema", "fibrosis", "hernia"]
    image = make_scene(8)[0]
    with torch.no_grad():
        probabilities = model(image[None]).sigmoid()[0]
    present = [i for i, value in enumerate(probabilities.tolist()) if value >= 0.5]
    assert 2 <= len(present) <= 6
    before = record_state(model)
    runs = []
    forward = model.forward
    model.forward = lambda images: (runs.append(len(images)), forward(images))[1]
    findings = answer.explain(model, image, labels)
    del model.forward
    expect_unchanged(before, model)
    assert 1 <= len(runs) <= 2, f"the model ran {len(runs)} times"
    assert set(findings) == {labels[i] for i in present}, f"the findings are {sorted(findings)}"
    for i in present:
        probability, received = findings[labels[i]]
        assert abs(float(probability) - float(probabilities[i])) < 1e-5, f"the probability of {labels[i]} is wrong"
        expect_map(received, grad_cam(model, "features", [image[None]], pick(i))[0], f"map of {labels[i]}")


if __name__ == "__main__":
    run_check(check)
