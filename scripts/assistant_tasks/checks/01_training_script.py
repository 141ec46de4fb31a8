"""The losses and weights equal those of a run without Grad-CAM; maps and overlays are those of each epoch."""

import copy
from pathlib import Path

import numpy as np
import torch
from common import SmallNet, expect_map, grad_cam, make_scene, read_rgb, run_check
from torch.nn.functional import cross_entropy


def check(answer):
    batches = [(torch.randn(6, 3, 32, 32), torch.randint(4, (6,))) for _ in range(4)]
    inputs = torch.cat([make_scene(seed, (32, 32)) for seed in (1, 2)])
    photos = [read_photo(image) for image in inputs]
    folder = Path("overlays")
    folder.mkdir()
    model = SmallNet(4, dropout=0.3)
    twin = copy.deepcopy(model)
    torch.manual_seed(5)
    expected_losses, expected_maps = train_without(twin, batches, inputs)
    torch.manual_seed(5)
    losses, maps = answer.train(model, batches, inputs, photos, folder)
    assert losses == expected_losses, "the losses differ from those of the script without Grad-CAM"
    for (name, value), other in zip(model.state_dict().items(), twin.state_dict().values()):
        assert torch.equal(value, other), f"the trained weights differ: {name}"
    assert model.training, "the model is not in training mode any more"
    assert len(maps) == 2, f"there are maps of {len(maps)} epochs, not of 2"
    for epoch in range(2):
        expect_map(maps[epoch], expected_maps[epoch], f"map of epoch {epoch}")
        for i, photo in enumerate(photos):
            overlay = read_rgb(folder / f"epoch{epoch}_{i}.png")
            assert overlay.shape == photo.shape, f"the overlay has the shape {overlay.shape}"
            assert not np.array_equal(overlay, photo), "the overlay shows no heatmap"


def read_photo(image):
    scaled = (image - image.min()) / (image.max() - image.min()) * 255
    return np.kron(scaled.byte().permute(1, 2, 0).numpy(), np.ones((3, 3, 1), np.uint8))


def train_without(model, batches, inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, maps = [], []
    model.train()
    for _ in range(2):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        maps.append(grad_cam(copy.deepcopy(model), "features", [inputs], lambda output: output.max(1).values))
    return losses, maps


if __name__ == "__main__":
    run_check(check)
