"""Train the model of the shop's cameras: too dark, right or too bright?"""

from torch import nn


def build():
    return nn.Sequential(
        nn.Conv2d(3, 6, 7, stride=4),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 3)),
    )


def make_transform():
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.Resize((96, 96)),
            transforms.ToTensor(),
            transforms.Normalize([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
        ]
    )
