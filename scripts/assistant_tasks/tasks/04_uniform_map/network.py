"""The classifier of our product."""

from torch import nn


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 5, stride=2, padding=2), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(12, 16, 3, stride=2, padding=1), nn.ReLU())
        self.neck = nn.Conv2d(16, 16, 1)
        self.side = nn.Conv2d(16, 5, 1)  # an auxiliary head, for training
        self.squeeze = nn.AdaptiveMaxPool2d(1)
        self.reduce = nn.Conv2d(16, 16, 1)
        self.classifier = nn.Linear(16, 5)

    def forward(self, images):
        grid = self.neck(self.body(self.stem(images)))
        self.side_output = self.side(grid)
        return self.classifier(self.reduce(self.squeeze(grid)).relu().flatten(1))
