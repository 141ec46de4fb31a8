"""Test `plan_stems` and file names: no result ever overwrites another result or an input."""

from __future__ import annotations

import contextlib
import os
import random
import unicodedata
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcam.batch import image_results, result_names
from gradcam.batch.image_results import ExplainRequest
from gradcam.batch.result_names import OutputOptions, check_outputs, list_endings, name_kinds, plan_stems
from gradcam.cam.methods.table import find_methods
from gradcam.errors import OutputError
from gradcam.images.files import MAX_NAME_BYTES, join_name
from gradcam.sources.collect import list_inputs
from gradcam.sources.contents import InputImage, UnreadableContent
from gradcam.storage.records import Explained
from gradcam.targets import Box, Keypoint, Like, Mask, MissedBox, Text, Token
from gradcam.targets.base import Instance, Target
from gradcam.targets.classes import ClassTarget

REFUSAL = UnreadableContent("is not needed here")


def plan(*names: str) -> dict[str, str]:
    return plan_stems([InputImage(name, REFUSAL) for name in names])


@pytest.mark.parametrize(
    ("names", "stems"),
    [
        (["a/b/cat.jpg", "a/cat.jpg", "cat.jpg"], ["a/b/cat", "a/cat", "cat"]),
        (["cat.jpg", "cat.png"], ["cat-jpg", "cat-png"]),
        (["cat.jpg", "cat.JPG"], ["cat-jpg-2", "cat-JPG"]),
        (["a/cat.jpg", "A/cat.jpg"], ["a/cat-jpg-2", "A/cat-jpg"]),
        (["cat.jpg", "cat.png", "cat-jpg.gif", "cat-jpg-2.gif"], ["cat-jpg-3", "cat-png", "cat-jpg", "cat-jpg-2"]),
        (["x.jpg", "X.jpg", "x.JPG"], ["x-jpg-3", "X-jpg", "x-JPG-2"]),
        (["x-jpg.2", "x-jpg.png", "x.jpg", "X.jpg"], ["x-jpg-2", "x-jpg-png", "x-jpg-3", "X-jpg"]),
        (["cat", "cat.jpg"], ["cat", "cat-jpg"]),
        (["stra\u00dfe.jpg", "STRASSE.jpg"], ["stra\u00dfe-jpg-2", "STRASSE-jpg"]),
        (["caf\u00e9.jpg", "cafe\u0301.png"], ["caf\u00e9-jpg", "cafe\u0301-png"]),
        (["caf\u00e9.jpg", "CAFE\u0301.jpg"], ["caf\u00e9-jpg-2", "CAFE\u0301-jpg"]),
        (["two.dots.jpg", "two.jpg"], ["two.dots", "two"]),
        ([".hidden.jpg", ".jpg"], [".hidden", ".jpg"]),
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
def test_a_stem_stays_in_its_folder_and_suits_every_file_system(name: str, stem: str) -> None:
    assert plan(name) == {name: stem}


def test_equal_stems_are_made_distinct() -> None:
    assert plan("a?.jpg", "a*.jpg", "a_.png") == {"a?.jpg": "a_-jpg-2", "a*.jpg": "a_-jpg", "a_.png": "a_-png"}
    assert plan("d./a.jpg", "d/a.jpg") == {"d./a.jpg": "d/a-jpg", "d/a.jpg": "d/a-jpg-2"}


def test_other_pictures_and_the_order_make_no_difference() -> None:
    names = ["cat.jpg", "Cat.JPG", "cat.png", "cat-jpg.gif", "x/cat.jpg", "y?.jpg", "y*.jpg", "long" * 60 + ".jpg"]
    expected = plan(*names)
    extra_names = [f"{number}/cat.jpg" for number in range(20)] + ["dog.jpg", "cat-2.jpg", "cats.jpg"]
    for seed in range(20):
        rng = random.Random(seed)
        mixed = [*names, *rng.sample(extra_names, rng.randint(0, len(extra_names)))]
        rng.shuffle(mixed)
        stems = plan(*mixed)
        assert {name: stems[name] for name in names} == expected


@pytest.mark.parametrize("character", ["a", "é", "猫", "🐈"])
def test_long_names_are_cut_between_characters_and_stay_apart(character: str) -> None:
    room = MAX_NAME_BYTES - result_names.MAX_ENDING_BYTES - 8
    names = [character * length + end + ".jpg" for length in range(10, 240) for end in ("", "1", "2")]
    stems = plan(*names)
    assert len(set(stems.values())) == len(names)
    for name, stem in stems.items():
        base_name = name.removesuffix(".jpg")
        assert len(stem.encode()) <= room
        assert (stem == base_name) == (len(base_name.encode()) <= room)
        assert stem.startswith(character * 10)
        assert unicodedata.normalize("NFC", stem) == stem


def test_a_long_stem_is_not_cut_again_by_the_name_of_its_overlay() -> None:
    """Truncating again would remove the hash that distinguishes two stems."""
    names = [f"{'a' * 230}{number}.{suffix}" for number in range(5) for suffix in ("jpg", "JPG", "png")]
    label = "l" * (result_names.MAX_ENDING_BYTES - len("-gradcam-999-.png") - len("-negative"))
    overlays = {join_name(stem, f"-gradcam-999-{label}-negative.png") for stem in plan(*names).values()}
    assert len(overlays) == len(names)


def test_very_deep_and_very_long_folders_can_be_made(tmp_path: Path) -> None:
    folders = ["/".join(["folder"] * 600), "/".join(["folder"] * 601), "猫" * 300, "猫" * 299]
    names = [f"{folder}/a.jpg" for folder in folders]
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
def test_stems_of_any_names_are_unique_and_safe(names: list[str], rng: random.Random) -> None:
    stems = plan(*names)
    assert list(stems) == names
    # macOS and Windows treat names that are equal after this folding as one name.
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
    shuffled = rng.sample(names, len(names))
    assert plan(*shuffled) == stems


@given(st.lists(st.from_regex(r"[abAB]{1,2}\.(jpg|png)", fullmatch=True), unique=True))
def test_a_unique_stem_is_kept(names: list[str]) -> None:
    for name, stem in plan(*names).items():
        stem_of_name = name.rpartition(".")[0]
        rivals = [name for name in names if name.rpartition(".")[0].lower() == stem_of_name.lower()]
        assert (stem == stem_of_name) == (rivals == [name])


def test_many_equal_names_take_no_time() -> None:
    names = ["".join(chr(1 + (number >> shift) % 30) for shift in (0, 5, 10)) + ".jpg" for number in range(2**15)]
    names = list(dict.fromkeys(names))
    assert len(set(plan(*names).values())) == len(names) > 20_000


# Results for boxes, masks, sentences and reference images

EDGES = (0.0, 0.0, 4.0, 4.0)
REFERENCE = {"like": "photos/o th.jpg"}
TARGET_CASES: list[tuple[Any, list[dict[str, Any]], list[str]]] = [
    (Box([3, 4]), [{"number": 3}, {"number": 4, "label": "traffic light"}], ["box3-person", "box4-traffic_light"]),
    (Box("all"), [{"number": 0}], ["box0-person"]),
    (Box(0), [{"number": 0}], [""]),
    (Box(3, "left"), [{"number": 3, "edge": "left"}], ["box3-person-left"]),
    (MissedBox([EDGES] * 2), [{"missed": True, "box": EDGES}, {"missed": True}], ["missed-0_0_4_4-person", "missed-person"]),
    (ClassTarget([[1]]), [{}], ["1-person"]),
    (ClassTarget(None, top=1), [{}], [""]),
    (Mask(None, (3, 4)), [{"mask": "3,4"}], ["mask-3_4-person"]),
    (Mask(), [{"mask": "predicted"}], [""]),
    (Text("a dog"), [{"text": "a dog"}], ["text-a_dog"]),
    (Token(None, 1), [{"word": 1, "label": "dog"}], ["word1-dog"]),
    (Token(), [{"word": 1, "label": "dog"}], [""]),
    (Token(word=1), [{"word": 1, "label": "dog"}], ["word1-dog"]),
    (Token(word=all), [{"word": 0, "label": "a"}], ["word0-a"]),
    (Token(say="a dog"), [{"word": 1, "label": "dog", "index": None}], ["word1-dog"]),
    (Token(against=5), [{"word": 0, "label": "yes", "against": ("no",)}], ["word0-yes"]),
    (
        Token(None, [(3, 4), 3]),
        [{"word": 3, "label": "red cup", "index": None}, {"word": 3, "label": "red"}],
        ["word3-red_cup", "word3-red"],
    ),
    (Keypoint(2), [{"keypoint": 2}], ["keypoint2"]),
    (Keypoint(0), [{"keypoint": 0}], [""]),
    (Mask(["dog", 3]), [{"mask": "predicted", "label": "dog"}, {"mask": "predicted"}], ["mask-dog", "mask-person"]),
    (Text(["a dog", "?"]), [{"text": "a dog"}, {"text": "?"}], ["text-a_dog", "text-_"]),
    (Token(None), [{"word": 0, "label": "##og"}, {"word": 11, "label": "a-b"}], ["word0-og", "word11-a_b"]),
    (Keypoint([0, 3], "x"), [{"keypoint": 0}, {"keypoint": 3}], ["keypoint0", "keypoint3"]),
    (Like("photos/o th.jpg"), [REFERENCE, {**REFERENCE, "on": "reference"}], ["like-o_th", "like-o_th-reference"]),
]  # fmt: skip


def test_the_record_of_a_word_names_its_alternative() -> None:
    word = image_results.describe_instance(Instance("word", "yes", 5, 0.5, 0, against=("no",)), Token())
    assert (word["word"], word["against"]) == (0, ("no",))
    assert image_results.describe_instance(Instance("word", "red cup", None, 0.5, 3), Token())["against"] is None


def results(entries: list[dict[str, Any]], method: str = "gradcam-pp") -> list[Any]:
    usual: dict[str, Any] = {"index": 1, "label": "person", "score": 0.5, "layer": "l", "method": method}
    usual |= {"overlay": None, "blank": False}
    return [SimpleNamespace(entry=Explained(**(usual | entry))) for entry in entries]


@pytest.mark.parametrize(("target", "entries", "expected"), TARGET_CASES)
@pytest.mark.parametrize("methods", [["gradcam-pp", "hirescam"], []], ids=["named", "its own"])
def test_results_are_named_after_their_target(
    target: Any, entries: list[dict[str, Any]], expected: list[str], methods: list[str]
) -> None:
    request = ExplainRequest(find_methods(methods) if methods else [], target=target)
    names = list_endings(request, results(entries), suffix=".jpg")
    assert names == [f"-gradcam-pp{'-' if end else ''}{end}.jpg" for end in expected]


def test_several_layers_have_distinct_names_for_a_method_that_the_target_sets() -> None:
    request = ExplainRequest([], target=Box([3]), layers=["a", "b.0"])
    layered = results([{"layer": layer, "number": 3} for layer in ("a", "b.0")], "gradcam")
    assert list_endings(request, layered) == ["-gradcam-box3-person-a.png", "-gradcam-box3-person-b.0.png"]


def test_a_result_on_the_reference_image_is_named_after_that_image() -> None:
    target, entries, _ = TARGET_CASES[-1]
    names = list_endings(ExplainRequest(target=target), results(entries), stem="a b", suffix="-net.png")
    assert names == ["a b-gradcam-pp-like-o_th-net.png", "o th-gradcam-pp-like-a_b-net.png"]
    kinds = name_kinds(names[0], OutputOptions(("map", "heatmap"), "png"))
    assert kinds == {"heatmap": "a b-gradcam-pp-like-o_th-net-heatmap.png", "map": "a b-gradcam-pp-like-o_th-net.npy"}


@pytest.mark.parametrize(
    ("target", "name", "is_result"),
    [
        (Box("all"), "a-gradcam-box12-person.png", True), (Box("all"), "a-gradcam2.png", False),
        (Box("all"), "a-compare.png", False), (Box(0), "a-gradcam.png", True),
        (Text(["b", "c"]), "a-gradcam-text-b.png", True), (Like("b.jpg"), "a-gradcam-like-b-reference.png", True),
    ],
)  # fmt: skip
def test_no_input_is_replaced(tmp_path: Path, target: Target, name: str, is_result: bool) -> None:
    for file in ("a.png", name):
        (tmp_path / file).touch()
    items = list_inputs([tmp_path]).items
    request, saving = ExplainRequest(find_methods(["gradcam"]), target=target), OutputOptions(format="png")
    settings: dict[str, Any] = {"saving": saving, "request": request}
    only_a = [item for item in items if item.name == "a.png"]
    for inputs, extra_paths in ((items, []), (only_a, [tmp_path / name])):
        expectation = pytest.raises(OutputError, match=f"{name}: a result in .* would replace this image")
        with expectation if is_result else contextlib.nullcontext():
            check_outputs(tmp_path, inputs, plan_stems(inputs), others=extra_paths, **settings)


def test_a_reference_image_is_recorded_with_slashes_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sep", "\\")
    assert image_results._name_like(Like(r"photos\cat.jpg")) == "photos/cat.jpg"
