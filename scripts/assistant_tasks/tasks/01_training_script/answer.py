"""Train a classifier, and look at where it looks after each epoch."""

import torch
from torch.nn.functional import cross_entropy


def train(model, batches, inputs, photos, folder):
    """Train for two epochs, and return the losses and the Grad-CAM maps (N,h,w) of each epoch.

    `batches` is a list of (images, labels). `inputs` (N,C,H,W) are preprocessed validation images, and `photos` the
    same images as uint8 arrays (H,W,3). `folder` is a pathlib.Path.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, maps = [], []
    model.train()
    for epoch in range(2):  # noqa: B007
        for images, labels in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        # TODO: add Grad-CAM here
    return losses, maps
