"""Words of a caption: where in the picture a model saw what it wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcam.errors import TargetError, shorten
from gradcam.families import find_family
from gradcam.families.base import Captioner, Seen
from gradcam.hooks.nested import Batch
from gradcam.targets.base import LOCAL, Bound, Instance, Reader, Scored, Target


@dataclass(frozen=True, eq=False)
class Token(Target):
    """A word that a model wrote of a picture: what it saw when it chose that word.

    The score is the word's logit, given the picture and the words before it: the caption is read again as it stands
    (teacher forcing), so that one forward pass and one batched backward pass serve all of its words. No attention
    weights are read, and models keep their fast attention.

    Parameters
    ----------
    ids : sequence of int, or Tensor (T,), default None
        The caption's tokens, without those that begin it or belong to a prompt. They are the same for all pictures. None
        for the caption that the model itself writes, word by word the most probable one; that is of one picture.
    position : int or sequence of int, default None
        Which of them are explained, counted from 0. None for all.

    Raises
    ------
    TargetError
        For a caption without tokens, and for a position that it does not have. When it meets a model: for one that
        writes no text, for tokens that are not in its vocabulary, and for a prompt that it needs and that is missing.

    Notes
    -----
    Models of an encoder and a decoder are given the pictures alone. Models that write on behind a prompt, such as LLaVA,
    are given a dict of what their processor makes of both: pixel_values, input_ids with the places that are kept for the
    picture, and attention_mask. The layer is the last block of the tower of pictures whose patches reach the words.

    Maps are of "hirescam", gradient times activation place by place. What reads patches by attention treats each of them
    differently, and a gradient that is pooled over the grid, as Grad-CAM's, loses which of them it wanted.

    Words before a word are part of its context, and what they name shows in its map, too (TAM). Their share has not been
    taken out: compare the maps of the words before it.

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
    Li et al., "Token Activation Map to Visually Explain Multimodal LLMs", ICCV 2025, on what words before a word add to
    its map.
    """

    ids: Any = None
    position: Any = None

    def __post_init__(self) -> None:
        if not self.positions or not all(_is_integer(it) and it >= 0 for it in self.positions):
            raise TargetError(
                f"The position is {shorten(self.position)}, expected the number of a token from 0, several, or None for all."
            )
        if self.ids is not None:
            self.choose(to_tokens(self.ids))

    @property
    def positions(self) -> Sequence[Any]:
        """As they were given; of all the first."""
        several = isinstance(self.position, (list, tuple, range))
        return self.position if several else [0 if self.position is None else self.position]

    def choose(self, tokens: Sequence[int]) -> list[int]:
        """Choose the positions of a caption's tokens that are explained.

        Parameters
        ----------
        tokens : sequence of int
            The caption's.

        Returns
        -------
        list of int
            Counted from 0.

        Raises
        ------
        TargetError
            Where there is no such token.
        """
        if self.position is None:
            return list(range(len(tokens)))
        if missing := [it for it in self.positions if it >= len(tokens)]:
            there = f"the caption has {len(tokens)}, 0 to {len(tokens) - 1}"
            raise TargetError(f"There is no token at position {missing[0]}: {there}.")
        return [int(it) for it in self.positions]

    def bind(self, model: nn.Module, batch: Batch) -> Bound:
        family = find_captioner(model)
        tokens = family.write(batch) if self.ids is None else to_tokens(self.ids)
        runs, own = family.bind(model, batch, tokens)
        try:
            names = family.words(tokens)
        except TargetError:  # without a tokenizer
            names = [f"token {token}" for token in tokens]
        reader = WordReader(family, own, tokens, self.choose(tokens), names)
        return Bound(runs, own, reader, family.layer, LOCAL, own_output=lambda seen: seen.output)


def to_tokens(ids: Any) -> list[int]:
    """A caption's tokens. Raises `TargetError` for what is no row of integers, and for none at all."""
    values = ids.tolist() if isinstance(ids, (Tensor, np.ndarray)) else ids
    if not isinstance(values, (list, tuple)) or not all(map(_is_integer, values)):
        raise TargetError(
            f"The caption is {shorten(ids)}, expected its tokens: integers in a list, or in a tensor (T,), such as "
            "model.generate(...)[0] without those that begin it."
        )
    if not values:
        raise TargetError("The caption has no tokens: there is no word to explain.")
    return [int(it) for it in values]


def find_captioner(model: nn.Module) -> Captioner:
    """What reads the words of a model. Raises `TargetError` for one that writes none, or is of no known family."""
    family = find_family(model, Captioner)
    if family is None:
        raise TargetError(
            f"The words of a {type(model).__name__} cannot be read: it is none of the models that write about pictures and "
            "are known here. Pass a function of its output as the target, from which a score is chosen for each image."
        )
    return family


@dataclass(frozen=True)
class WordReader(Reader):
    """The logits of a caption's tokens, each at its place, in what a captioner's run gave."""

    family: Captioner
    batch: Batch
    tokens: Sequence[int]
    positions: Sequence[int]
    names: Sequence[str]

    def score(self, output: Seen, images: int) -> Scored:
        logits = self.family.read(output, self.batch, self.tokens)[:, list(self.positions)]  # (N,K,V)
        chosen = torch.tensor([self.tokens[it] for it in self.positions], dtype=torch.int64, device=logits.device)
        values = logits.gather(2, chosen[None, :, None].expand(len(logits), -1, 1))[..., 0]
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        rivals = logits.detach().to(values.dtype).logsumexp(2)
        sure = (values.detach() - rivals).exp().tolist()
        instances = [
            [
                Instance("word", self.names[place], self.tokens[place], score, place)
                for place, score in zip(self.positions, own)
            ]
            for own in sure
        ]
        return Scored(values, chosen.expand(len(logits), -1), None, self, instances)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
