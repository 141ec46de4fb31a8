"""Test `find_class`, which turns typed text into the index of a class."""

from __future__ import annotations

import pytest

import gradcam
from gradcam.errors import TargetError
from gradcam.models.labels import find_class

LABELS = ["7", "tiger cat", "Egyptian cat", "crane", "Crane", "St_Bernard", "0", "café", "tiger", "-3"]


@pytest.mark.parametrize(
    ("typed", "index"),
    [
        ("Tiger_Cat", 1),
        ("  tiger   cat ", 1),
        ("st bernard", 5),
        ("CAFÉ", 7),
        ("tiger", 8),
        ("0", 0),
        ("7", 7),
        (" 3 ", 3),
        ("+2", 2),
        ("007", 7),
        ("name:7", 0),
        ("name:-3", 9),
        ("name: 7 ", 0),
        ("name:tiger cat", 1),
    ],
)
def test_a_class_is_found_by_its_name_or_its_index(typed: str, index: int) -> None:
    assert find_class(LABELS, typed) == index


def refuse(typed: str, message: str, labels: list[str] = LABELS) -> None:
    with pytest.raises(TargetError) as caught:
        find_class(labels, typed)
    assert str(caught.value) == message


def test_any_index_is_accepted_if_the_number_of_classes_is_unknown() -> None:
    assert find_class(None, "17") == 17
    with pytest.raises(TargetError, match="Class -1 does not exist: classes are counted from 0"):
        find_class(None, "-1")


@pytest.mark.parametrize("typed", ["10", "-1", "1000000"])
def test_an_index_out_of_range_is_refused_with_the_range(typed: str) -> None:
    refuse(typed, f"Class {typed} does not exist: this model has 10 classes, 0 to 9.")


@pytest.mark.parametrize("typed", ["crane", "CRANE", "name:crane"])
def test_a_name_of_several_classes_is_refused_with_their_indices(typed: str) -> None:
    refuse(typed, f"Several classes are called '{typed}': choose one by its index, 3 (crane), 4 (Crane).")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tigr cat", "'tiger cat', 'tiger', 'Egyptian cat'"),
        ("egyptain_cat", "'Egyptian cat'"),
        ("cat", "'tiger cat', 'Egyptian cat'"),
        ("bernard", "'St_Bernard'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(typed: str, offered: str) -> None:
    refuse(typed, f"No class is called '{typed}'; nearest: {offered}.")


@pytest.mark.parametrize("typed", ["zzzzzz", "", "name:", "²", "--5", "1.5", "½", "+", "7:name"])
def test_a_name_like_no_other_is_refused_with_examples(typed: str) -> None:
    message = f"No class is called '{typed}'; the model has 3 classes, such as 'ant', 'bee', 'cow'."
    refuse(typed, message, ["ant", "bee", "cow"])


def test_classes_of_imagenet(classifier: gradcam.Classifier) -> None:
    assert [classifier.find_class(typed) for typed in ("koala", "EGYPTIAN_CAT", "999")] == [105, 285, 999]
    for typed, message in (("koalla", "nearest: 'koala'"), ("cardigan", r"264 \(Cardigan\), 474 \(cardigan\)")):
        with pytest.raises(TargetError, match=message):
            classifier.find_class(typed)
