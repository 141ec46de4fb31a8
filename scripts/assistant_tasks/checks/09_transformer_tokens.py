"""The maps equal plain autograd on the patch tokens of the right layer."""

import torch
from common import (
    TASKS,
    differentiate,
    expect_map,
    expect_unchanged,
    import_file,
    make_scene,
    pick,
    record_state,
    run_check,
    weigh_channels,
)


def check(answer):
    network = import_file(TASKS / "09_transformer_tokens/network.py", "network")
    torch.manual_seed(2)
    model = network.Network().eval()
    images = torch.cat([make_scene(seed, (48, 80)) for seed in (20, 21)])
    before = record_state(model)
    expect_map(answer.explain(model, images, 3), compute_map(model, images, "blocks.1.attention_norm", 3))
    for number in (0, 1):
        maps = answer.explain_block(model, images, 1, number)
        expected = compute_map(model, images, f"blocks.{number}.attention_norm", 1)
        expect_map(maps, expected, f"map of block {number}")
    expect_unchanged(before, model)


def compute_map(model, images, layer, target):
    tokens = differentiate(model, layer, [images], pick(target))[:2]
    grids = [values[:, 1:16].reshape(len(images), 3, 5, -1).permute(0, 3, 1, 2) for values in tokens]
    return weigh_channels(*grids).relu()


if __name__ == "__main__":
    run_check(check)
