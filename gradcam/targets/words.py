"""The target for captioning models: the words of a caption."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcam.adapters.base import CaptionerAdapter, ModelRun
from gradcam.adapters.tokenizers import UNSPACED_LETTER
from gradcam.errors import TargetError, shorten
from gradcam.hooks.containers import Batch, at_least_float32
from gradcam.hooks.preserve import preserve_state
from gradcam.options import argument_error, check_choice, check_count
from gradcam.targets.base import LOCAL_METHOD, BoundTarget, Instance, ScoreExtractor, Target, TargetScores
from gradcam.targets.boxes import list_numbers, require_family
from gradcam.targets.word_controls import blank_images, subtract_context, warn_of_sinks

SEQUENCES = (list, tuple, range)
EXPECTED_TEXTS = {"say": "a sentence.", "prompt": "a question.", "against": "a word, or a token id from 0."}


@dataclass(frozen=True, eq=False)
class Token(Target):
    """A word of a caption: explain which parts of the image made the model choose the word.

    The score is the word's logit, given the image and all earlier words. The finished caption is the model's input
    (teacher forcing), so one forward pass and a few batched backward passes explain all words. Attention weights are
    not needed, so the model can keep fused attention kernels.

    Parameters
    ----------
    ids : sequence of int, or Tensor (T,), default None
        The caption's tokens, without start tokens and prompt. All images share this caption. If None, the model
        generates the caption by greedy decoding, for one image at a time.
    position : int, sequence of int, or nested sequence, default None
        The positions of the tokens to explain, counted from 0. ``[(3, 4), 7]`` means two maps: one of the phrase of
        tokens 3 and 4, and one of token 7. None means all tokens.
    word : int, sequence of int, or all, default None
        The words to explain, counted from 0, with one map for each word. The builtin `all` means all words. A word may
        have several tokens. Words are separated by white space, and do not include the punctuation around them. In
        languages without spaces between words, each token is a word. Needs the model's tokenizer.
    say : str, default None
        A sentence to explain instead of the generated caption. The model need not have generated it. Needs the model's
        tokenizer.
    score : str, default "logit"
        "logit", or "logprob": the logarithm of the token's probability, given the earlier tokens. The score of a
        phrase or word is the sum over its tokens.
    against : str or int, default None
        An alternative word, or its token: explain why the model prefers the word to this alternative, for example "yes"
        to "no". The score is the difference of their logits at the same position. Only the first token of each is
        compared. Unless `position` or `word` is given, the first token of the caption is explained.
    prompt : str, default None
        A question about the image. Only models that `gradcam.load_model` returns take it.
    max_tokens : int, default 40
        The maximum length of a generated caption, in tokens.
    control : str, default None
        "blank" also computes each word's probability with a blank image, in one more forward pass. If the image makes a word
        less than 1.5 times as probable, the word follows from the text, and its map says nothing about the image. The
        instances have `without_image` and `is_from_text`. There is also a warning about cells that are hot for nearly all
        words.
    context : str, default "keep"
        "subtract" subtracts from each map what the maps of the earlier words explain. This needs a target that selects
        all words or all tokens.
    processor : Any, default None
        The model's processor, whose tokenizer reads and writes the words. If None, the tokenizer in the model's folder
        is used. Models that `gradcam.load_model` returns set it.

    Raises
    ------
    TargetError
        If the caption has no tokens, if a position or word does not exist, if an argument is invalid, or if two
        arguments exclude each other. When used with a model: if the model generates no text, or a token is outside its
        vocabulary. If a prompt or a tokenizer is needed but missing.

    Notes
    -----
    Encoder-decoder models take the images alone. Models that continue a prompt, such as LLaVA, take their processor's
    output as a dict: pixel_values, input_ids with the image's placeholder tokens, and attention_mask. For these models,
    the default is "elementwise-gradcam" at the output of the projector, which passes the patches to the text model. The
    method "lens" needs no backward pass.

    For all other models, the default is "hirescam" (gradient times activation, element-wise) at the layer of the image
    encoder that passes its patches to the text model; for GIT, at the projection of the patches. Attention gives each
    patch a different weight, and Grad-CAM would average these weights by pooling the gradient.

    Earlier words are part of a word's context, so objects named by earlier words also appear in the word's map (TAM).
    By default, this contribution is not removed: compare the map with the maps of the earlier words.

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

    One map of a phrase, and the difference between a word and an alternative:

    >>> phrase = gradcam.explain(model, torch.rand(1, 3, 32, 32), target=Token([7, 8, 9], [(0, 1)], score="logprob"))
    >>> phrase.instances[0][0].name, phrase.maps.shape[1]
    ('token 7 token 8', 1)
    >>> difference = gradcam.explain(model, torch.rand(1, 3, 32, 32), target=Token([7], against=8))
    >>> difference.instances[0][0].against
    ('token 8',)

    References
    ----------
    Li et al., "Token Activation Map to Visually Explain Multimodal LLMs", ICCV 2025, on the contribution of earlier
    words to a word's map.
    """

    ids: Any = None
    position: Any = None
    word: Any = field(default=None, kw_only=True)
    say: str | None = field(default=None, kw_only=True)
    score: str = field(default="logit", kw_only=True)
    against: str | int | None = field(default=None, kw_only=True)
    prompt: str | None = field(default=None, kw_only=True)
    max_tokens: int = field(default=40, kw_only=True)
    control: str | None = field(default=None, kw_only=True)
    context: str = field(default="keep", kw_only=True)
    processor: Any = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if not self.phrases or not all(map(_is_phrase, self.phrases)):
            expected = "the number of a token, several numbers, or None for all. [(3, 4), 7] is a phrase and a token."
            raise argument_error(self.position, "The position", expected, TargetError)
        list_numbers(0 if self.word is None else self.word, "The word")
        for first, second in (("ids", "say"), ("position", "word")):
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise TargetError(f"{first}= and {second}= exclude each other: give only one of them.")
        for name, expected in EXPECTED_TEXTS.items():
            value, is_token = getattr(self, name), name == "against" and _is_position(getattr(self, name))
            if value is not None and not is_token and not (isinstance(value, str) and value.strip()):
                raise argument_error(value, f"{name}=", expected, TargetError)
        check_choice(self.score, "The score", ("logit", "logprob"), TargetError)
        check_choice(self.control or "blank", "control=", ("blank",), TargetError)
        check_choice(self.context, "context=", ("keep", "subtract"), TargetError)
        is_first_only = self.against is not None and self.word is None
        if self.context == "subtract" and (
            is_first_only or self.position is not None or self.word not in (None, all, "all")
        ):
            raise TargetError("context='subtract' needs the maps of all earlier words: leave position= and word= out.")
        check_count(self.max_tokens, "max_tokens", error=TargetError)
        if self.ids is not None and (tokens := to_tokens(self.ids)) and self.word is None:
            self.choose(tokens)  # Words are known only after decoding.

    @property
    def phrases(self) -> list[list[Any]]:
        """Return the positions of each map. If `position` is None, return [[0]], which passes all checks."""
        position = 0 if self.position is None else self.position
        entries: Any = position if isinstance(position, SEQUENCES) else [position]
        return [list(entry) if isinstance(entry, SEQUENCES) else [entry] for entry in entries]

    def choose(self, tokens: Sequence[int], parts: Sequence[str] = ()) -> list[tuple[int, list[int]]]:
        """Return the tokens that each map explains, and check that the caption has them.

        Parameters
        ----------
        tokens : sequence of int
            The caption's tokens.
        parts : sequence of str, default ()
            The part of the caption that each token adds. Used only for words.

        Returns
        -------
        list of (int, list of int)
            For each map, the number of the word or of its first token, and the positions of its tokens, from 0.

        Raises
        ------
        TargetError
            If a position or word does not exist.
        """
        if self.word is not None:
            words = split_words(parts)
            numbers = list_numbers(self.word, "The word") or range(max(1, len(words)))
            if missing := [number for number in numbers if number >= len(words)]:
                listing = shorten(["".join(parts[i] for i in word).strip() for word in words] or "".join(parts))
                problem = f"There is no word {missing[0]}"
                raise TargetError(f"{problem}. The caption has {len(words)} word(s), counted from 0: {listing}.")
            return [(number, words[number]) for number in numbers]
        count = len(tokens)
        has_default = self.position is None and self.against is None
        phrases = [[i] for i in range(count)] if has_default else [sorted(map(int, phrase)) for phrase in self.phrases]
        if missing := [i for phrase in phrases for i in phrase if i >= count]:
            raise TargetError(f"There is no token at position {missing[0]}: the positions are 0 to {count - 1}.")
        return [(phrase[0], phrase) for phrase in phrases]

    def bind(self, model: nn.Module, batch: Batch) -> BoundTarget:
        family = require_family(model, CaptionerAdapter, "captioning model")
        family.processor = self.processor
        if self.prompt is not None:
            advice = "or load the model with gradcam.load_model(model, processor=processor), and call its explain."
            advice = f"pass the processor's output for the prompt and the image, {advice}"
            raise TargetError(f"The prompt is part of the model's input: {advice}")
        if self.say is not None:
            tokens = family.encode_sentence(self.say.strip(), batch)
        else:
            tokens = family.write(batch, self.max_tokens) if self.ids is None else to_tokens(self.ids)
        module, text_batch = family.bind(model, batch, tokens)
        if self.word is not None:
            family.decode_tokens(tokens)  # Raises an error if there is no tokenizer.
        names, parts = _decode(family, tokens)
        choice = self.choose(tokens, parts)
        phrases = [phrase for _, phrase in choice]
        alternatives, against = self._find_alternatives(family, [tokens[phrase[0]] for phrase in phrases])
        instances = []
        for number, phrase in choice:
            text, index = "".join(parts[i] for i in phrase), tokens[phrase[0]] if len(phrase) == 1 else None
            form = "word" if self.word is not None else "phrase" if index is None else "token"
            name = names[phrase[0]] if form == "token" else text.strip()
            # The first bytes of a character have no text.
            instances.append(Instance("word", name, index, None, number, against=against, form=form, text=text or name))
        extractor = WordScoreExtractor(family, text_batch, tokens, phrases, instances, alternatives, self.score)
        if self.control is not None:
            extractor = replace(extractor, baselines=_predict_without_image(module, extractor))
        fields: Any = {"own_output": lambda run: run.output, "refine": self._refine}
        return BoundTarget(module, text_batch, extractor, family.layer, LOCAL_METHOD, **fields)

    def _refine(self, maps: Tensor) -> Tensor:
        """Warn of attention sinks, and subtract the maps of earlier words."""
        if self.control is not None:
            warn_of_sinks(maps)
        return subtract_context(maps) if self.context == "subtract" else maps

    def _find_alternatives(self, family: CaptionerAdapter, tokens: Sequence[int]) -> tuple[list[int], tuple[str, ...]]:
        """Return the alternative to each token, and the name of the alternative; or ([], ())."""
        if self.against is None:
            return [], ()
        text = self.against.strip() if isinstance(self.against, str) else None
        alternatives = [int(self.against) if text is None else family.encode_alternative(text, i) for i in tokens]
        if same := [i for i, alternative in zip(tokens, alternatives) if i == alternative]:
            problem = f"The word and its alternative, {shorten(self.against)}, begin with the same token, {same[0]}"
            raise TargetError(f"{problem}. Only first tokens are compared: choose another alternative.")
        return alternatives, (text or _decode(family, alternatives[:1])[0][0],)


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


def split_words(parts: Sequence[str]) -> list[list[int]]:
    """Return the positions of the tokens of each word, without the punctuation around it.

    `parts` are the parts of the caption that the tokens add.
    """
    words, before, has_letters = [list[int]()], " ", list[bool]()
    for i, part in enumerate(parts):
        if part and (part[0].isspace() or before[-1].isspace() or UNSPACED_LETTER.search(before + part)):
            words.append([])
        words[-1].append(i)
        before = part or before  # A token without a part belongs to the character before it.
        has_letters.append(any(unicodedata.category(character)[0] in "LMN" for character in before))
    lettered_words = ([i for i in word if has_letters[i]] for word in words)
    return [list(range(lettered[0], lettered[-1] + 1)) for lettered in lettered_words if lettered]


def _decode(family: CaptionerAdapter, tokens: Sequence[int]) -> tuple[list[str], list[str]]:
    """Return the name of each token, and the part of the caption that the token adds."""
    try:
        return family.decode_tokens(tokens), family.split_caption(tokens)
    except TargetError:  # The model has no tokenizer.
        names = [f"token {token}" for token in tokens]
        return names, [f" {name}" for name in names]


@dataclass(frozen=True)
class WordScoreExtractor(ScoreExtractor):
    """Extracts the scores of words: the sum of the logits or log-probabilities of a word's tokens.

    `phrases` are the positions of each word's tokens, and `instances` describe the words without their probabilities.
    If there are `alternatives`, the score is the logit of a word's first token minus the logit of its alternative.
    """

    family: CaptionerAdapter
    batch: Batch
    tokens: Sequence[int]
    phrases: Sequence[Sequence[int]]
    instances: Sequence[Instance]
    alternatives: Sequence[int] = ()
    quantity: str = "logit"
    baselines: Sequence[Sequence[float | None]] | None = None  # Each word's probability with a blank image.

    def score(self, output: ModelRun, images: int) -> TargetScores:
        positions = [position for phrase in self.phrases for position in phrase]
        logits = self.family.read(output, self.batch, self.tokens)[:, positions]  # (N,P,V)
        values = _select(logits, [self.tokens[position] for position in positions])
        has_gradient = self.quantity == "logprob"  # Logits alone are cheaper to differentiate.
        logprobs = values - (logits if has_gradient else logits.detach()).to(values.dtype).logsumexp(2)
        scores = self._add(logprobs if has_gradient else values)
        if self.alternatives:
            firsts = [0, *itertools.accumulate(map(len, self.phrases))][:-1]
            scores = values[:, firsts] - _select(logits[:, firsts], self.alternatives)
        probabilities = self._add(logprobs.detach()).exp().tolist()
        baselines = self.baselines or [[None] * len(self.instances)] * len(probabilities)
        instances = [
            [replace(instance, score=p, without_image=q) for instance, p, q in zip(self.instances, row, baseline)]
            for row, baseline in zip(probabilities, baselines)
        ]
        indices = [-1 if instance.index is None else instance.index for instance in self.instances]
        classes = torch.tensor(indices, dtype=torch.int64, device=logits.device).expand(len(logits), -1)
        return TargetScores(scores, classes, None, self, instances)

    def to_directions(self, embeddings: Tensor) -> Tensor:
        """Return a vector (K,C) for each word, from output embeddings (V,C).

        The embedding of several tokens is their mean. If there are alternatives, their embeddings are subtracted.
        """
        if self.alternatives:
            firsts = [self.tokens[phrase[0]] for phrase in self.phrases]
            return embeddings[firsts] - embeddings[list(self.alternatives)]
        return torch.stack([embeddings[[self.tokens[i] for i in phrase]].mean(0) for phrase in self.phrases])

    def _add(self, values: Tensor) -> Tensor:
        """Add up the values (N,P) of the tokens of each word; return (N,K)."""
        return torch.stack([part.sum(1) for part in values.split(list(map(len, self.phrases)), 1)], 1)


def _predict_without_image(module: nn.Module, extractor: WordScoreExtractor) -> list[list[float | None]]:
    """Return each word's probability if the images are blank."""
    with preserve_state(module), torch.no_grad():
        output = blank_images(extractor.batch).run(module)
        rows = extractor.score(output, extractor.batch.images).instances or ()
    return [[instance.score for instance in row] for row in rows]


def _select(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return the logits (N,P) of one token for each position, in float32 or float64."""
    if max(tokens) >= logits.shape[2]:
        offer = f"the vocabulary has {logits.shape[2]} tokens, 0 to {logits.shape[2] - 1}"
        raise TargetError(f"There is no token {max(tokens)}: {offer}.")
    indices = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    values = logits.gather(2, indices[None, :, None].expand(len(logits), -1, 1))[..., 0]
    return at_least_float32(values)


def _is_phrase(positions: Sequence[Any]) -> bool:
    """Return whether these are positions, each of them once."""
    return 0 < len(positions) == len(set(map(repr, positions))) and all(map(_is_position, positions))


def _is_position(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
