"""The transformer of our product."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens):
        normalised = self.attention_norm(tokens)
        tokens = tokens + self.attention(normalised, normalised, normalised, need_weights=False)[0]
        return tokens + self.mlp(self.mlp_norm(tokens))


class Network(nn.Module):
    def __init__(self, width=24, classes=5):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.registers = nn.Parameter(torch.randn(1, 2, width))
        self.position = nn.Parameter(torch.randn(1, 15, width))
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, images):
        patches = self.patches(images).flatten(2).transpose(1, 2) + self.position
        count = len(images)
        tokens = torch.cat([self.class_token.expand(count, -1, -1), patches, self.registers.expand(count, -1, -1)], 1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.classifier(self.norm(tokens)[:, 0])
