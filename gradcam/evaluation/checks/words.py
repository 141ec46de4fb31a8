"""Say why the heatmap of a word is not worth a test: the text before the word explains it."""

from __future__ import annotations

from gradcam.targets.base import MIN_PROBABILITY_RATIO, Instance


def describe_word_from_text(word: Instance) -> str | None:
    """Return a sentence that says why the word follows from the text before it; None if it depends on the image."""
    if not word.is_from_text:
        return None
    change = "lowers" if (word.score or 0) * MIN_PROBABILITY_RATIO < (word.without_image or 0) else "hardly changes"
    return (
        f"The image {change} the probability of {word.name!r} ({word.score:#.2g} with it, {word.without_image:#.2g} "
        "without): the map of this word says nothing about the image."
    )
