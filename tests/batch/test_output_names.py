"""plan_stems(): what the results of many pictures are called, so that none is ever written over another."""

from __future__ import annotations

import os
import random
import unicodedata
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcam.batch.names import ENDING, plan_stems
from gradcam.images.files import LONGEST_NAME, overlay_name
from gradcam.sources.contents import Item, Refused

NOTHING = Refused("is not needed here")


def plan(*names: str, **options: int) -> dict[str, str]:
    return plan_stems([Item(name, NOTHING) for name in names], **options)


@pytest.mark.parametrize(
    ("names", "stems"),
    [
        (["cat.jpg"], ["cat"]),
        (["a/b/cat.jpg", "a/cat.jpg", "cat.jpg"], ["a/b/cat", "a/cat", "cat"]),
        (["cat.jpg", "cat.png"], ["cat-jpg", "cat-png"]),
        (["a/cat.jpg", "b/cat.png"], ["a/cat", "b/cat"]),
        (["cat.jpg", "CAT.png"], ["cat-jpg", "CAT-png"]),
        (["cat.jpg", "cat.JPG"], ["cat-jpg-2", "cat-JPG"]),
        (["a/cat.jpg", "A/cat.jpg"], ["a/cat-jpg-2", "A/cat-jpg"]),
        (["cat.jpg", "cat.png", "cat-jpg.gif"], ["cat-jpg-2", "cat-png", "cat-jpg"]),
        (["cat.jpg", "cat.png", "cat-jpg.gif", "cat-jpg-2.gif"], ["cat-jpg-3", "cat-png", "cat-jpg", "cat-jpg-2"]),
        (["x.jpg", "X.jpg", "x.JPG"], ["x-jpg-3", "X-jpg", "x-JPG-2"]),
        (["x-jpg.2", "x-jpg.png", "x.jpg", "X.jpg"], ["x-jpg-2", "x-jpg-png", "x-jpg-3", "X-jpg"]),
        (["cat", "cat.jpg"], ["cat", "cat-jpg"]),
        (["stra\u00dfe.jpg", "STRASSE.jpg"], ["stra\u00dfe-jpg-2", "STRASSE-jpg"]),
        (["caf\u00e9.jpg", "cafe\u0301.png"], ["caf\u00e9-jpg", "cafe\u0301-png"]),
        (["caf\u00e9.jpg", "CAFE\u0301.jpg"], ["caf\u00e9-jpg-2", "CAFE\u0301-jpg"]),
        (["two.dots.jpg", "two.jpg"], ["two.dots", "two"]),
        ([".hidden.jpg", ".jpg"], [".hidden", ".jpg"]),
        (["archive.zip/a.jpg"], ["archive.zip/a"]),
        (["two  words/a b.jpg", "猫/é.jpg", "-n.jpg"], ["two  words/a b", "猫/é", "-n"]),
    ],
)
def test_stems(names: list[str], stems: list[str]) -> None:
    assert plan(*names) == dict(zip(names, stems))


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("../../etc/a.jpg", "_/_/etc/a"), ("/etc/a.jpg", "etc/a"), ("//a//b.jpg", "a/b"), ("./a.jpg", "_/a"),
        ("..", "_"), (".", "_"), ("", "_"), ("a/", "a"),
        ("..\\a.jpg", ".._a"), ("C:\\a\\b.jpg", "C__a_b"), ("C:/a.jpg", "C_/a"),
        ('<img src=x onerror="alert(1)">.jpg', "_img src=x onerror=_alert(1)__"),
        ("what?*|.jpg", "what___"),
        ("two\nlines\x1b[2J\x00.jpg", "two_lines_[2J_"),
        ("dots./spaces /...  ./a..jpg", "dots/spaces/_/a."),
        (os.fsdecode(b"caf\xe9/\xff.jpg"), "caf_/_"),
        ("\ud800.jpg", "_"),
    ],
)  # fmt: skip
def test_a_stem_leads_nowhere_else_and_every_file_system_takes_it(name: str, stem: str) -> None:
    assert plan(name) == {name: stem}


def test_what_becomes_the_same_is_told_apart() -> None:
    assert plan("a?.jpg", "a*.jpg", "a_.png") == {"a?.jpg": "a_-jpg-2", "a*.jpg": "a_-jpg", "a_.png": "a_-png"}
    assert plan("d./a.jpg", "d/a.jpg") == {"d./a.jpg": "d/a-jpg", "d/a.jpg": "d/a-jpg-2"}


def test_other_pictures_and_the_order_make_no_difference() -> None:
    names = ["cat.jpg", "Cat.JPG", "cat.png", "cat-jpg.gif", "x/cat.jpg", "y?.jpg", "y*.jpg", "long" * 60 + ".jpg"]
    expected = plan(*names)
    others = [f"{number}/cat.jpg" for number in range(20)] + ["dog.jpg", "cat-2.jpg", "cats.jpg"]
    for seed in range(20):
        draw = random.Random(seed)
        mixed = [*names, *draw.sample(others, draw.randint(0, len(others)))]
        draw.shuffle(mixed)
        stems = plan(*mixed)
        assert {name: stems[name] for name in names} == expected


@pytest.mark.parametrize("character", ["a", "é", "猫", "🐈"])
def test_long_names_are_cut_between_characters_and_stay_apart(character: str) -> None:
    room = LONGEST_NAME - ENDING - 8
    names = [character * length + end + ".jpg" for length in range(10, 240) for end in ("", "1", "2")]
    stems = plan(*names)
    assert len(set(stems.values())) == len(names)
    for name, stem in stems.items():
        own = name.removesuffix(".jpg")
        assert len(stem.encode()) <= room
        assert (stem == own) == (len(own.encode()) <= room)
        assert stem.startswith(character * 10)
        assert unicodedata.normalize("NFC", stem) == stem


def test_a_long_stem_is_not_cut_again_by_the_name_of_its_overlay() -> None:
    """The cut would take the hash that tells two stems apart."""
    names = [f"{'a' * 230}{number}.{suffix}" for number in range(5) for suffix in ("jpg", "JPG", "png")]
    label = "l" * (ENDING - len("-gradcam-999-.png") - len("-negative"))
    overlays = {
        overlay_name(stem, "gradcam", index=999, label=label[:70], layer=label[70:] + "x" * 5, evidence="negative")
        for stem in plan(*names).values()
    }
    assert len(overlays) == len(names)
    for stem in plan(*names, ending=40).values():
        name = overlay_name(stem, "gradcam", index=999, label="tiger cat")
        assert name.startswith(stem + "-gradcam-")
        assert 200 < len(name.encode()) <= LONGEST_NAME


def test_very_deep_and_very_long_folders_can_be_made(tmp_path: Path) -> None:
    names = [
        "/".join(["folder"] * 600) + "/a.jpg",
        "/".join(["folder"] * 601) + "/a.jpg",
        "猫" * 300 + "/a.jpg",
        "猫" * 299 + "/a.jpg",
    ]
    stems = plan(*names)
    assert len(set(stems.values())) == 4
    for stem in stems.values():
        path = tmp_path / f"{stem}-gradcam.png"
        path.parent.mkdir(parents=True)
        path.touch()
    assert stems[names[2]].startswith("猫猫猫")


PARTS = st.text(st.sampled_from("aAbBéÉe\u0301ſsSßKK.-2_ /\\:?") | st.characters(), max_size=6)
SUFFIXES = st.sampled_from(["", ".jpg", ".JPG", ".png", "-jpg.png", "-jpg-2.jpg"])
SETS = st.lists(st.builds(lambda part, suffix: part + suffix, PARTS, SUFFIXES), unique=True, max_size=12)


@given(SETS, st.randoms(use_true_random=False))
def test_stems_of_any_names_are_unique_and_safe(names: list[str], draw: random.Random) -> None:
    stems = plan(*names)
    assert list(stems) == names
    # Independent of the code: what macOS and Windows take for one name.
    folded = {unicodedata.normalize("NFC", stem).casefold() for stem in stems.values()}
    assert len(folded) == len(names)
    for stem in stems.values():
        path = PurePosixPath(stem)
        assert stem == str(path)
        assert not path.is_absolute()
        assert ".." not in path.parts
        assert path.name
        assert not set(stem) & set('<>:"|?*\\\0\n')
        assert all(not folder.endswith((".", " ")) for folder in path.parts[:-1])
        stem.encode()
    shuffled = draw.sample(names, len(names))
    assert plan(*shuffled) == stems


@given(st.lists(st.from_regex(r"[abAB]{1,2}\.(jpg|png)", fullmatch=True), unique=True))
def test_a_stem_that_is_nobody_elses_is_kept(names: list[str]) -> None:
    for name, stem in plan(*names).items():
        own = name.rpartition(".")[0]
        rivals = [other for other in names if other.rpartition(".")[0].lower() == own.lower()]
        assert (stem == own) == (rivals == [name])


def test_many_alike_take_no_time() -> None:
    names = ["".join(chr(1 + (number >> shift) % 30) for shift in (0, 5, 10)) + ".jpg" for number in range(2**15)]
    names = list(dict.fromkeys(names))
    assert len(set(plan(*names).values())) == len(names) > 20_000
