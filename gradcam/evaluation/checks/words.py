"""What is special about the check of a word: the text before it may explain it, and other words are its rivals."""

from __future__ import annotations

from collections.abc import Sequence

from gradcam.targets.base import MIN_PROBABILITY_RATIO, Instance


def describe_word_from_text(word: Instance) -> str | None:
    """Return a sentence that says why the word follows from the text before it; None if it depends on the image."""
    if not word.is_from_text:
        return None
    with_image, without_image = word.score or 0.0, word.without_image or 0.0
    change = "lowers" if with_image * MIN_PROBABILITY_RATIO < without_image else "hardly changes"
    return (
        f"The image {change} the probability of {word.name!r} ({with_image:.2g} with it, {without_image:.2g} without): the "
        "map of this word says nothing about the image."
    )


def rank_other_words(words: Sequence[Instance], index: int) -> list[int]:
    """Return the indices of the other words. The words whose probability depends most on the image are first."""
    others = [i for i in range(len(words)) if i != index]
    return sorted(others, key=lambda i: (words[i].without_image or 0) / max(words[i].score or 0, 1e-12))
