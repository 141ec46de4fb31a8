"""The target for captioning models: the words of a caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcam.adapters.base import CaptionerAdapter, ModelRun
from gradcam.errors import TargetError, shorten
from gradcam.hooks.containers import Batch
from gradcam.options import argument_error
from gradcam.targets.base import LOCAL_METHOD, BoundTarget, Instance, ScoreExtractor, Target, TargetScores
from gradcam.targets.boxes import require_family


@dataclass(frozen=True, eq=False)
class Token(Target):
    """A word of a caption: explain which parts of the image made the model choose the word.

    The score is the word's logit, given the image and all earlier words. The finished caption is the model's input
    (teacher forcing), so one forward pass and one batched backward pass explain all words. Attention weights are
    not needed, so the model can keep fused attention kernels.

    Parameters
    ----------
    ids : sequence of int, or Tensor (T,), default None
        The caption's tokens, without start tokens and prompt. All images share this caption. If None, the model
        generates the caption by greedy decoding, for one image at a time.
    position : int or sequence of int, default None
        The positions of the tokens to explain, counted from 0. None means all tokens.

    Raises
    ------
    TargetError
        If the caption has no tokens, or a position does not exist. When used with a model: if the model generates no
        text, if a token is outside the model's vocabulary, or if the model needs a prompt that was not passed.

    Notes
    -----
    Encoder-decoder models take the images alone. Models that continue a prompt, such as LLaVA, take their processor's
    output as a dict: pixel_values, input_ids with the image's placeholder tokens, and attention_mask. The default
    layer is the layer of the image encoder that passes its patches to the text model.

    The default method is "hirescam" (gradient times activation, element-wise). Attention gives each patch a different
    weight, and Grad-CAM would average these weights by pooling the gradient.

    Earlier words are part of a word's context, so objects named by earlier words also appear in the word's map (TAM).
    This contribution is not removed: compare the map with the maps of the earlier words.

    Examples
    --------
    >>> import gradcam, torch
    >>> from gradcam.targets import Token
    >>> from transformers import GitConfig, GitForCausalLM
    >>> small = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    >>> vision = small | dict(image_size=32, patch_size=8)
    >>> model = GitForCausalLM(GitConfig(vision_config=vision, vocab_size=30, bos_token_id=1, **small)).eval()
    >>> explanation = gradcam.explain(model, torch.rand(1, 3, 32, 32), target=Token([7, 8, 9], [0, 2]))
    >>> explanation.maps.shape, explanation.instances[0][1].name
    (torch.Size([1, 2, 4, 4]), 'token 9')

    References
    ----------
    Li et al., "Token Activation Map to Visually Explain Multimodal LLMs", ICCV 2025, on the contribution of earlier
    words to a word's map.
    """

    ids: Any = None
    position: Any = None

    def __post_init__(self) -> None:
        if not self.positions or not all(_is_integer(position) and position >= 0 for position in self.positions):
            expected = "a token number from 0, several, or None for all."
            raise argument_error(self.position, "The position", expected, TargetError)
        if self.ids is not None:
            self.choose(to_tokens(self.ids))

    @property
    def positions(self) -> Sequence[Any]:
        """Return the positions as a sequence. If `position` is None, return [0], which passes all checks."""
        has_several = isinstance(self.position, (list, tuple, range))
        return self.position if has_several else [0 if self.position is None else self.position]

    def choose(self, tokens: Sequence[int]) -> list[int]:
        """Return the positions of the tokens to explain, and check that the caption has these positions.

        Parameters
        ----------
        tokens : sequence of int
            The caption's tokens.

        Returns
        -------
        list of int
            The positions, counted from 0.

        Raises
        ------
        TargetError
            If a position does not exist.
        """
        if self.position is None:
            return list(range(len(tokens)))
        count = len(tokens)
        if missing := [position for position in self.positions if position >= count]:
            raise TargetError(f"There is no token at position {missing[0]}: the caption has {count}, 0 to {count - 1}.")
        return [int(position) for position in self.positions]

    def bind(self, model: nn.Module, batch: Batch) -> BoundTarget:
        family = require_family(model, CaptionerAdapter, "captioning model")
        tokens = family.write(batch) if self.ids is None else to_tokens(self.ids)
        module, text_batch = family.bind(model, batch, tokens)
        try:
            names, texts = family.decode_tokens(tokens), family.split_caption(tokens)
        except TargetError:  # The model has no tokenizer.
            names = [f"token {token}" for token in tokens]
            texts = [f" {name}" for name in names]
        extractor = WordScoreExtractor(family, text_batch, tokens, self.choose(tokens), names, texts)
        return BoundTarget(module, text_batch, extractor, family.layer, LOCAL_METHOD, own_output=lambda run: run.output)


def to_tokens(ids: Any) -> list[int]:
    """Return a caption's tokens as a list. Raise `TargetError` if they are not integers, or there are none."""
    values = ids.tolist() if isinstance(ids, (Tensor, np.ndarray)) else ids
    if not isinstance(values, (list, tuple)) or not all(map(_is_integer, values)):
        raise TargetError(
            f"The caption is {shorten(ids)}, expected its tokens: integers in a list, or in a tensor (T,), such as "
            "model.generate(...)[0] without the prompt's tokens."
        )
    if not values:
        raise TargetError("The caption has no tokens, so there is no word to explain.")
    return [int(token) for token in values]


@dataclass(frozen=True)
class WordScoreExtractor(ScoreExtractor):
    """Extracts the scores of words: the logit of each explained token in the caption."""

    family: CaptionerAdapter
    batch: Batch
    tokens: Sequence[int]
    positions: Sequence[int]
    names: Sequence[str]
    texts: Sequence[str]

    def score(self, output: ModelRun, images: int) -> TargetScores:
        logits = self.family.read(output, self.batch, self.tokens)[:, list(self.positions)]  # (N,K,V)
        tokens = [self.tokens[position] for position in self.positions]
        token_ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
        values = logits.gather(2, token_ids[None, :, None].expand(len(logits), -1, 1))[..., 0]
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        log_normalizers = logits.detach().to(values.dtype).logsumexp(2)
        instances = [
            [
                Instance("word", self.names[i], self.tokens[i], probability, i, text=self.texts[i])
                for i, probability in zip(self.positions, row)
            ]
            for row in (values.detach() - log_normalizers).exp().tolist()
        ]
        return TargetScores(values, token_ids.expand(len(logits), -1), None, self, instances)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
