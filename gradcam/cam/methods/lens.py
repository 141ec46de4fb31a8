"""The logit lens: the words that a text model reads in each image token."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from gradcam.adapters.vision_language import VisionLanguageModel
from gradcam.cam.forward import RecordedPass
from gradcam.cam.grid import GridActivations
from gradcam.errors import LayerError, ModelError, TargetError
from gradcam.targets.words import WordScoreExtractor

MAX_LOGIT_BYTES = 2**24  # The limit for the logits of all words at some of the image tokens.


def lens(recorded: RecordedPass, site: GridActivations) -> Tensor:
    """Logit lens: the probability of each word at the image tokens of a text model's layer.

    The final norm and the output embeddings are applied to the layer's image tokens, for all words at once. For a word of
    several tokens, the map is the geometric mean of their probabilities. For a word against an alternative, the map is the
    difference of the logits. Scales and limits that a model applies to all logits are left out. nostalgebraist,
    "Interpreting GPT: the logit lens", LessWrong 2020; for image tokens: Li et al., "Token Activation Map to Visually
    Explain Multimodal LLMs", ICCV 2025, which uses logits instead of probabilities.
    """
    words = getattr(recorded.scored.target, "target", None)  # The target has rows for images in pieces.
    family = words.family if isinstance(words, WordScoreExtractor) else None
    if not isinstance(words, WordScoreExtractor) or not isinstance(family, VisionLanguageModel):
        raise TargetError(
            "The method 'lens' explains words of vision-language models, such as LLaVA: pass "
            "gradcam.targets.Token(...) as target=, and the output of the model's processor. For other models and "
            "targets, choose another method."
        )
    layers, layer = family.list_text_layers(), re.split("[ #:]", site.layer)[0]
    if layer not in layers:
        problem = (
            f"The method 'lens' reads image tokens in the text model, and layer '{site.layer}' is not one of its blocks"
        )
        raise LayerError(f"{problem}: choose one of '{layers[0]}' to '{layers[-2]}', or leave layer= out.")
    prefix = f"{family.prefix}." if family.prefix else ""
    embeddings = family.model.get_output_embeddings().weight.detach()
    if embeddings.is_meta:
        problem = "The method 'lens' needs the output embeddings, which are offloaded"
        raise ModelError(f"{problem}: load the model without offloading them.")
    tokens = site.grid.movedim(1, -1)
    features = tokens if layer == layers[-1] else family.model.get_submodule(layers[-1].removeprefix(prefix))(tokens)
    maps = features @ words.to_directions(embeddings).to(features).T
    if not words.alternatives:  # In the difference of two words, the log-normaliser cancels.
        rows = features.flatten(0, -2).to(embeddings)
        chunks = rows.split(max(1, MAX_LOGIT_BYTES // (embeddings.element_size() * len(embeddings))))
        normalizers = torch.cat([(chunk @ embeddings.T).to(maps).logsumexp(1) for chunk in chunks])
        maps = (maps - normalizers.view(*maps.shape[:-1], 1)).exp()
    return maps.movedim(-1, 1)
