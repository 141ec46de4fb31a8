"""The logit lens: the words that a text model reads in each image token."""

from __future__ import annotations

import re

from torch import Tensor

from gradcam.adapters.vision_language import VisionLanguageModel
from gradcam.cam.forward import RecordedPass
from gradcam.cam.grid import GridActivations
from gradcam.errors import LayerError, ModelError, TargetError
from gradcam.targets.words import WordScoreExtractor


def lens(recorded: RecordedPass, site: GridActivations) -> Tensor:
    """Logit lens: the logit of each word at the image tokens of a text model's layer.

    The final norm and the output embeddings of the words are applied to the layer's image tokens. All words need one
    matrix product. nostalgebraist, "Interpreting GPT: the logit lens", LessWrong 2020; for image tokens: Li et al., "Token
    Activation Map to Visually Explain Multimodal LLMs", ICCV 2025. The mean logit over the vocabulary is subtracted. A
    word of several tokens has the sum of their logits. Scales and limits that a model applies to all logits are left out.
    """
    words = getattr(recorded.scored.target, "target", None)  # The target has rows for images in pieces.
    family = words.family if isinstance(words, WordScoreExtractor) else None
    if not isinstance(words, WordScoreExtractor) or not isinstance(family, VisionLanguageModel):
        raise TargetError(
            "lens explains words of vision-language models, such as LLaVA: pass target=gradcam.targets.Token(...), and the "
            "output of the model's processor. For other models and targets, choose another method."
        )
    layers, layer = family.list_text_layers(), re.split("[ #:]", site.layer)[0]
    if layer not in layers:
        raise LayerError(
            f"lens reads image tokens in the text model, and layer '{site.layer}' is not one of its blocks: choose one of "
            f"'{layers[0]}' to '{layers[-2]}', or leave layer= out."
        )
    embeddings = family.model.get_output_embeddings().weight.detach()
    if embeddings.is_meta:
        raise ModelError(
            "lens needs the output embeddings, which are offloaded: load the model without offloading them."
        )
    tokens = site.grid.movedim(1, -1)
    norm = family.model.get_submodule(layers[-1])
    features = tokens if layer == layers[-1] else norm(tokens)
    return (features @ words.to_directions(embeddings).to(features).T).movedim(-1, 1)
