"""Save tiny vision-language models with their processors, like folders from the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.adapters.vlm import FAMILIES, VOCABULARY

TEMPLATE = """{% for message in messages %}USER: {% for part in message['content'] %}
{%- if part['type'] == 'image' %}IMAGE {% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endfor %} ASSISTANT:"""
WITHOUT_TEMPLATE = ("llava", "paligemma", "florence2")  # as in the first folders of these models on the hub


def write_template(name: str) -> str:
    """Return a chat template in which each image is the placeholder of this family."""
    return TEMPLATE.replace("IMAGE", FAMILIES[name].image)


def make_parts(name: str) -> tuple[Any, Any]:
    """Return a model whose answers have only words of the vocabulary, and its processor."""
    torch.manual_seed(0)
    model, processor = FAMILIES[name].make_model(), FAMILIES[name].make_processor("torchvision")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    with torch.no_grad():
        head.weight[len(VOCABULARY) :] = 0
        head.weight[:4] = 0  # the special tokens
    if name not in WITHOUT_TEMPLATE:
        processor.chat_template = write_template(name)
    return model, processor


def save_folder(name: str, folder: Path) -> Path:
    """Save a model with its processor to a subfolder, and return the subfolder."""
    model, processor = make_parts(name)
    model.save_pretrained(folder / name)
    processor.save_pretrained(folder / name)
    return folder / name
