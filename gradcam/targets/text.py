"""The target for image-text models: the cosine of the embeddings of a sentence and the image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradcam.adapters.base import Embedder
from gradcam.adapters.embedding import TwoTowers, find_embedder
from gradcam.errors import TargetError, shorten
from gradcam.hooks.containers import Batch
from gradcam.options import argument_error
from gradcam.targets.base import BoundTarget, Instance, Target
from gradcam.targets.likeness import CosineScoreExtractor, bind_cosines, to_directions


@dataclass(frozen=True, eq=False)
class Text(Target):
    """A sentence: explain what in the image matches the sentence, for image-text models such as CLIP.

    The score is the cosine similarity of the image's and the sentence's embeddings. If `against` has sentences, the
    mean similarity to these sentences is subtracted. The model's own tokenizer and text encoder embed each sentence
    once. Only the image encoder runs for an explanation.

    Parameters
    ----------
    text : str, sequence of str, Tensor (D,) or (T,D)
        The sentences to explain, or their embeddings. Each sentence gives one map.
    against : str, sequence of str, Tensor (D,) or (A,D), default ()
        The sentences whose mean similarity is subtracted, or their embeddings.
    tokenizer : callable, default None
        A function that takes a list of sentences and returns the input of the model's text encoder. The function
        replaces the model's own tokenizer.

    Raises
    ------
    TargetError
        If a sentence is empty or missing, or is neither text nor an embedding. When used with a model: if the model has
        no text encoder or no tokenizer, or a sentence is too long.

    Examples
    --------
    >>> import gradcam, open_clip, torch
    >>> from gradcam.targets import Text
    >>> model = open_clip.CLIP(
    ...     16, {"image_size": 32, "patch_size": 8, "width": 64, "layers": 2}, {"width": 16, "heads": 2, "layers": 2}
    ... ).eval()
    >>> sentences = ["a dog on a sofa", "a cat"]
    >>> explanation = gradcam.explain(model, torch.rand(1, 3, 32, 32), target=Text(sentences, against="an empty sofa"))
    >>> explanation.heatmaps.shape, explanation.instances[0][1].name
    (torch.Size([1, 2, 32, 32]), 'a cat')

    References
    ----------
    Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021.
    """

    text: Any
    against: Any = ()
    tokenizer: Any = None

    def __post_init__(self) -> None:
        for name, value in (("text", self.text), ("against", self.against)):
            if isinstance(value, Tensor):
                if value.ndim not in (1, 2) or not value.is_floating_point() or not value.numel():
                    shape = tuple(value.shape)
                    raise TargetError(f"{name} is {value.dtype} {shape}, expected embeddings (D,) or (T,D).")
                continue
            if (sentences := to_sentences(value)) is None:
                raise argument_error(value, name, "one or several sentences, or their embeddings.", TargetError)
            if not all(sentence.strip() for sentence in sentences) or (name == "text" and not sentences):
                raise TargetError(f"{name} is {shorten(value)}: a sentence is empty. Describe what to look for.")
        if self.tokenizer is not None and not callable(self.tokenizer):
            expected = "a function that takes a list of sentences."
            raise argument_error(self.tokenizer, "The tokenizer", expected, TargetError)

    def bind(self, model: nn.Module, batch: Batch) -> BoundTarget:
        family = find_embedder(model)
        contrasts = () if isinstance(self.against, Tensor) else tuple(to_sentences(self.against) or ())
        has_contrasts = bool(contrasts) or isinstance(self.against, Tensor)
        against = self._embed(self.against, family, model) if has_contrasts else None
        directions, units = to_directions(self._embed(self.text, family, model), against)
        names = to_sentences(self.text) or [f"embedding {i}" for i in range(len(units))]
        is_text = self.tokenizer is None and not isinstance(self.text, Tensor) and not isinstance(self.against, Tensor)
        form = "text" if is_text else "embedding"
        instances = [Instance("text", name, against=contrasts, form=form) for name in names]
        return bind_cosines(model, batch, CosineScoreExtractor(family, batch, directions, units, instances))

    def _embed(self, sentences: Any, family: Embedder, model: nn.Module) -> Tensor:
        if isinstance(sentences, Tensor):
            return sentences.reshape(-1, sentences.shape[-1])
        if not isinstance(family, TwoTowers):
            raise TargetError(
                f"{type(model).__name__} has no text encoder: use an image-text model, such as CLIP or SigLIP. For a "
                "classifier, pass a class (target=281, --class). To compare images, use targets.Like (--like)."
            )
        return family.embed_texts(to_sentences(sentences) or [], self.tokenizer)


def to_sentences(value: Any) -> Sequence[str] | None:
    """Return one or several sentences as a list; None if the value is not text."""
    sentences = [value] if isinstance(value, str) else value
    is_list = isinstance(sentences, (list, tuple)) and all(isinstance(sentence, str) for sentence in sentences)
    return list(sentences) if is_list else None
