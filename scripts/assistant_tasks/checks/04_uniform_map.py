"""The cause is the pooling, the layer is the last one before it, and the map is that of this layer."""

import torch
from common import (
    TASKS,
    expect_map,
    expect_unchanged,
    grad_cam,
    import_file,
    make_scene,
    pick,
    record_state,
    run_check,
)  # fmt: skip


def check(answer):
    model = import_file(TASKS / "04_uniform_map/network.py", "network").Network().eval().requires_grad_(False)
    images = torch.cat([make_scene(seed) for seed in (5, 6)])
    assert answer.CAUSE in answer.CAUSES, "CAUSE is not one of CAUSES"
    assert "after the pooling" in answer.CAUSE, "CAUSE is wrong"
    assert answer.LAYER == "neck", f"LAYER is {answer.LAYER!r}: wrong"
    before = record_state(model)
    maps = answer.explain(model, images, 2)
    expect_unchanged(before, model)
    inputs = images.clone().requires_grad_()
    expect_map(maps, grad_cam(model, "neck", [inputs], pick(2)))


if __name__ == "__main__":
    run_check(check)
