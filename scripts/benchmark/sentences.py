"""Compare the maps of fifty sentences per image with one pass of the encoder, and with another library's recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmark.cases import SEED, SIZE
from benchmark.contenders import Call
from benchmark.detection import time_on
from benchmark.measuring import Settings, keep_freed_memory, report_progress, take_turns
from benchmark.tables import Table, format_spread

SENTENCES = 50
BARE, OURS, PEER = (
    "one pass of the image encoder",
    f"gradcam, {SENTENCES} sentences",
    f"pytorch-grad-cam, {SENTENCES} sentences",
)
BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
TEXT = {"num_hidden_layers": 1}  # The configuration requires a text encoder, which never runs.


def build_clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    return CLIPModel(CLIPConfig(text_config=TEXT, vision_config={**BASE, "patch_size": 16, "image_size": SIZE}))


def build_siglip() -> nn.Module:
    from transformers import SiglipConfig, SiglipModel

    return SiglipModel(SiglipConfig(text_config=TEXT, vision_config={**BASE, "patch_size": 16, "image_size": SIZE}))


def build_mean() -> nn.Module:
    import open_clip

    vision = {"image_size": SIZE, "layers": 12, "width": 768, "patch_size": 16, "pool_type": "avg"}
    return open_clip.CLIP(512, vision, {"width": 64, "heads": 2, "layers": 1})


def build_convolutional() -> nn.Module:
    import open_clip

    vision = {"image_size": SIZE, "layers": (3, 4, 6, 3), "width": 64}
    return open_clip.CLIP(512, vision, {"width": 64, "heads": 2, "layers": 1})


TOWERS: dict[str, Callable[[], nn.Module]] = {
    "CLIP, ViT-B/16": build_clip,
    "SigLIP, ViT-B/16": build_siglip,
    "mean-pooled tokens, ViT-B/16 (open_clip)": build_mean,
    "CLIP, ResNet-50 (open_clip)": build_convolutional,
}


def compare_sentences(settings: Settings) -> Iterator[Table]:
    """Time the explanation of random sentence embeddings. The image encoders have random weights."""
    keep_freed_memory()
    for device in settings.devices:
        yield tabulate_sentences(device, settings)


def tabulate_sentences(device: str, settings: Settings) -> Table:
    rows, raw = [], []
    for name in TOWERS:
        for batch, rounds in settings.rounds.items():
            report_progress("sentences", device, name, f"batch {batch}")
            method, seconds = time_tower(name, batch, rounds, device, settings)
            absent = "not measured" if "pytorch-grad-cam" in settings.missing else "-"  # A dash means no recipe.
            peer = format_spread(np.divide(seconds[PEER], seconds[BARE])) if PEER in seconds else absent
            bare = f"{1000 * float(np.median(seconds[BARE])):.0f} ms"
            ours = f"{format_spread(np.divide(seconds[OURS], seconds[BARE]))}, {method}"
            rows.append([name, str(batch), bare, ours, peer])
            raw.append({"device": device, "tower": name, "batch": batch, "seconds": seconds, "method": method})
    notes = [
        f"Multiples of one pass of the image encoder in the same round, {SIZE} px. The sentences are passed as embeddings, "
        "which are computed once. The method is the default of the model.",
        "pytorch-grad-cam's example for CLIP computes Grad-CAM at the first norm of the last block, one sentence at a time. "
        f"Its time is that of one sentence times {SENTENCES}.",
    ]
    header = ["model", "batch", BARE, OURS, PEER]
    return Table(f"sentences {device}", f"Maps of sentences ({device})", header, rows, notes, raw)


def time_tower(
    name: str, batch: int, rounds: int, device: str, settings: Settings
) -> tuple[str, dict[str, list[float]]]:
    import gradcam

    torch.manual_seed(SEED)
    model = TOWERS[name]().eval().to(device)
    images = torch.randn(batch, 3, SIZE, SIZE, device=device)
    embed = find_tower(model)
    with torch.no_grad():
        sentences = torch.randn(SENTENCES, embed(images).shape[-1], device=device)
    target = gradcam.targets.Text(sentences)

    def run_bare() -> Any:
        with torch.no_grad():
            return embed(images)

    calls: dict[str, Call] = {BARE: run_bare, OURS: lambda: gradcam.explain(model, images, target=target)}
    if "pytorch-grad-cam" not in settings.missing and hasattr(model, "vision_model"):
        calls[PEER] = attach_peer(model, embed, images, sentences)
    timed = {key: time_on(device, call) for key, call in calls.items()}
    for measure in timed.values():
        measure()
    seconds = take_turns(timed, rounds)
    if PEER in seconds:
        seconds[PEER] = [SENTENCES * sentence_seconds for sentence_seconds in seconds[PEER]]
    return gradcam.explain(model, images, target=target).method, seconds


def find_tower(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the function that computes the embeddings of images."""
    if hasattr(model, "encode_image"):
        return model.encode_image

    def embed(images: Tensor) -> Tensor:
        output = model.get_image_features(pixel_values=images)
        return output if isinstance(output, Tensor) else output.pooler_output

    return embed


class Similarity(nn.Module):
    """A model that scores images against each sentence by cosine similarity."""

    def __init__(self, model: nn.Module, embed: Callable[[Tensor], Tensor], sentences: Tensor) -> None:
        super().__init__()
        self.model, self._embed = model, embed
        self._sentences = nn.functional.normalize(sentences, dim=-1)

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.normalize(self._embed(images), dim=-1) @ self._sentences.T


def attach_peer(model: Any, embed: Callable[[Tensor], Tensor], images: Tensor, sentences: Tensor) -> Call:
    """Return the recipe of pytorch-grad-cam's example for CLIP."""
    import pytorch_grad_cam
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    layer = model.vision_model.encoder.layers[-1].layer_norm1

    def to_grid(tokens: Tensor) -> Tensor:
        side = int(tokens.shape[1] ** 0.5)
        return tokens[:, tokens.shape[1] - side**2 :].unflatten(1, (side, side)).permute(0, 3, 1, 2)

    wrapped = Similarity(model, embed, sentences)

    def explain() -> object:
        with pytorch_grad_cam.GradCAM(wrapped, [layer], reshape_transform=to_grid) as cam:
            return cam(images, targets=[ClassifierOutputTarget(0)] * len(images))

    return explain
