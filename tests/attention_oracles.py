"""Compute attention explanations of transformers one number at a time, as in the papers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Anatomy:
    """The tensors of a transformer's forward pass, with their graph.

    Attention (N,heads,T,T) and output (N,T,D) of each block, and the head of the model.
    """

    attentions: Sequence[Tensor]
    outputs: Sequence[Tensor]
    head: Callable[[Tensor], Tensor]

    def gradients(self, image: int, index: int) -> list[Array]:
        """Return the gradients of a class logit at the attention of each block: (heads,T,T) each."""
        score = self.head(self.outputs[-1])[image, index]
        actual = torch.autograd.grad(score, list(self.attentions), retain_graph=True)
        return [gradient[image].numpy() for gradient in actual]

    def own_gradients(self, image: int, index: int) -> list[Array]:
        """Return the gradients at each block's attention of the logit that the head computes from that block's output."""
        results = []
        for attention, output in zip(self.attentions, self.outputs):
            score = self.head(output)[image, index]
            results.append(torch.autograd.grad(score, attention, retain_graph=True)[0][image].numpy())
        return results

    def values(self, image: int) -> list[Array]:
        return [attention[image].detach().numpy() for attention in self.attentions]


def rollout(attentions: Sequence[Array], read: Sequence[int]) -> Array:
    """Return attention rollout (Abnar & Zuidema, equation 1): the full matrix product, some rows of which are averaged."""
    tokens = attentions[0].shape[-1]
    product = np.eye(tokens)
    for attention in attentions:
        mean = np.zeros((tokens, tokens))
        for head in attention:
            mean += head / len(attention)
        block = 0.5 * mean + 0.5 * np.eye(tokens)
        for row in range(tokens):
            block[row] /= sum(block[row])
        product = block @ product
    return np.mean([product[row] for row in read], axis=0)


def gradient_rollout(attentions: Sequence[Array], gradients: Sequence[Array], read: Sequence[int]) -> Array:
    """Return gradient rollout (Chefer et al., equations 5 and 6): the part of R that was added to the identity."""
    tokens = attentions[0].shape[-1]
    relevance = np.eye(tokens)
    for attention, gradient in zip(attentions, gradients):
        mean = np.zeros((tokens, tokens))
        for head, slope in zip(attention, gradient):
            for i, j in np.ndindex(tokens, tokens):
                mean[i, j] += max(slope[i, j] * head[i, j], 0.0) / len(attention)
        relevance = relevance + mean @ relevance
    return np.mean([(relevance - np.eye(tokens))[row] for row in read], axis=0)


def legrad(gradients: Sequence[Array]) -> Array:
    """Return LeGrad (Bousselham et al., equations 5 to 8) before the minimum is subtracted."""
    total = np.zeros(gradients[0].shape[-1])
    for gradient in gradients:
        heads, queries, keys = gradient.shape
        for head, query, key in np.ndindex(heads, queries, keys):
            total[key] += max(gradient[head, query, key], 0.0) / heads / queries / len(gradients)
    return total


def maps(name: str, anatomy: Anatomy, classes: list[list[int]], read: Sequence[int], grid: Sequence[int]) -> Tensor:
    """Return maps (N,K,h,w) for classes (N,K). The image tokens are the last tokens."""
    rows = []
    for image, indices in enumerate(classes):
        for index in indices:
            if name == "rollout":
                values = rollout(anatomy.values(image), read)
            elif name == "gradient-rollout":
                values = gradient_rollout(anatomy.values(image), anatomy.gradients(image, index), read)
            else:
                values = legrad(anatomy.own_gradients(image, index))
            rows.append(torch.from_numpy(values[-grid[0] * grid[1] :].reshape(grid)))
    return torch.stack(rows).unflatten(0, (len(classes), -1))


class Block(nn.Module):
    """A block with explicit attention; `seen` records its intermediate values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.seen: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(tokens)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = (query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).softmax(-1)
        self.seen[:] = [attention]
        tokens = tokens + self.out((attention @ value).transpose(1, 2).flatten(2))
        return tokens + self.mlp(tokens)


class OpenViT(nn.Module):
    """A small transformer for images of 16 x 24 in patches of 8.

    `reads` selects the head's tokens: "class", "patches", "all".
    """

    def __init__(self, reads: str = "class", prefix: int = 1, blocks: int = 3, block: Any = Block) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.patches = nn.Conv2d(3, 8, 8, 8)
        self.first = nn.Parameter(torch.randn(1, prefix, 8))
        self.positions = nn.Parameter(torch.randn(1, prefix + 6, 8))
        self.blocks = nn.ModuleList(block(8, 2) for _ in range(blocks))
        self.norm, self.classify = nn.LayerNorm(8), nn.Linear(8, 5)
        self.reads, self.prefix = reads, prefix
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.6)
        self.double().eval()

    def embed(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(len(tokens), -1, -1), tokens], 1) + self.positions

    def head(self, tokens: Tensor) -> Tensor:
        tokens = self.norm(tokens)
        start = {"class": slice(0, 1), "patches": slice(self.prefix, None), "all": slice(None)}[self.reads]
        return self.classify(tokens[:, start].mean(1))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens)

    def open(self, images: Tensor) -> Anatomy:
        tokens, outputs = self.embed(images), []
        for block in self.blocks:
            tokens = block(tokens)
            outputs.append(tokens)
        return Anatomy([block.seen[0] for block in self.blocks], outputs, self.head)


def open_torchvision(model: Any, images: Tensor) -> Anatomy:
    """Build the equivalent of torchvision's `VisionTransformer` from its weights."""
    tokens = model.conv_proj(images).flatten(2).transpose(1, 2)
    tokens = torch.cat([model.class_token.expand(len(images), -1, -1), tokens], 1) + model.encoder.pos_embedding
    attentions, outputs = [], []
    for block in model.encoder.layers:
        inner = block.self_attention
        projected = block.ln_1(tokens) @ inner.in_proj_weight.T + inner.in_proj_bias
        query, key, value = projected.unflatten(-1, (3, inner.num_heads, -1)).permute(2, 0, 3, 1, 4)
        logits = torch.einsum("nhqd,nhkd->nhqk", query, key) / inner.head_dim**0.5
        exponentials = (logits - logits.amax(-1, keepdim=True)).exp()
        attentions.append(exponentials / exponentials.sum(-1, keepdim=True))
        mixed = torch.einsum("nhqk,nhkd->nqhd", attentions[-1], value).flatten(2)
        tokens = tokens + inner.out_proj(mixed)
        tokens = tokens + block.mlp(block.ln_2(tokens))
        outputs.append(tokens)
    return Anatomy(attentions, outputs, lambda tokens: model.heads(model.encoder.ln(tokens)[:, 0]))


def open_hugging_face(model: Any, images: Tensor) -> Anatomy:
    """Record the values of transformers' `ViTForImageClassification` with eager attention."""
    output = model(images, output_attentions=True, output_hidden_states=True)
    hidden = list(output.hidden_states[1:])
    assert len(hidden) == len(output.attentions)
    return Anatomy(output.attentions, hidden, lambda tokens: model.classifier(model.vit.layernorm(tokens)[:, 0]))


def open_timm(model: Any, images: Tensor) -> Anatomy:
    """Record the values of timm's `VisionTransformer` without fused attention, with hooks on the attention dropout."""
    attentions: list[Tensor] = []
    outputs: list[Tensor] = []
    handles = []
    for block in model.blocks:
        handles.append(block.attn.attn_drop.register_forward_hook(lambda *hook_args: attentions.append(hook_args[2])))
        handles.append(block.register_forward_hook(lambda *hook_args: outputs.append(hook_args[2])))
    model(images)
    for handle in handles:
        handle.remove()
    return Anatomy(attentions, outputs, lambda tokens: model.forward_head(model.norm(tokens)))
