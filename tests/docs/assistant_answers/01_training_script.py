import torch
from torch.nn.functional import cross_entropy

import gradcam


def train(model, batches, inputs, photos, folder):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, maps = [], []
    model.train()
    for epoch in range(2):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        explanation = gradcam.explain(model, inputs, "features")
        maps.append(explanation.maps[:, 0])
        for i, photo in enumerate(photos):
            overlay = gradcam.overlay(photo, explanation.heatmaps[i, 0], region=(0, 0, *photo.shape[:2]))
            gradcam.write_image(folder / f"epoch{epoch}_{i}.png", overlay)
    return losses, maps
