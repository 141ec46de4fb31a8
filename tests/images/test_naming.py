"""Test the names of overlays: each name says what the file is, and no name belongs to a file of another purpose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradcam.images.files import READ_SUFFIXES, WRITE_SUFFIXES, OutputNames, join_name, to_safe_name

MAX_NAME_BYTES = 255  # nearly every file system has this limit


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("tiger cat", "tiger_cat"), ("layer3.0.conv1", "layer3.0.conv1"),
        ('a/b\\c:d*e?f"g<h>i|j', "a_b_c_d_e_f_g_h_i_j"), ("rock 'n' roll (50 %)", "rock_n_roll_50"),
        ("../../etc", "etc"), ("crème brûlée 猫", "crème_brûlée_猫"), ("two\nlines", "two_lines"), ("", "_"),
        ("???", "_"),
    ],
)  # fmt: skip
def test_a_label_in_a_name_is_plain(text: str, plain: str) -> None:
    assert to_safe_name(text) == plain


@pytest.mark.parametrize("stem", ["two  words", "a.b.c", "猫", "-n", ".hidden", "caf\udce9"])
def test_the_stem_is_kept_as_it_is(stem: str) -> None:
    assert join_name(stem, "-layercam.png") == f"{stem}-layercam.png"


@pytest.mark.parametrize("character", ["a", "é", "猫", "🐈"])
@pytest.mark.parametrize("length", [200, 231, 232, 233, 234, 235, 400])
def test_a_long_stem_is_cut_between_characters(character: str, length: int) -> None:
    name = join_name(character * length, "-layercam.png")
    stem = name.removesuffix("-layercam.png")
    assert set(stem) == {character}
    size = len(character.encode())
    assert len(stem) == min(length, (240 - len("-layercam.png")) // size)


@pytest.mark.parametrize("character", ["a", "é", "猫", "🐈"])
def test_a_name_fits_whatever_its_parts(tmp_path: Path, character: str) -> None:
    label = to_safe_name(character * 300)
    name = join_name(character * 300, f"-ablationcam-99999-{label}-{label}.png")
    (path,) = OutputNames(tmp_path, [tmp_path / name]).claim([name])
    assert path.name.endswith("-2.png")
    assert len(os.fsencode(path.name)) <= MAX_NAME_BYTES
    path.touch()


def claim(folder: Path, inputs: list[Path], *names: str) -> list[str]:
    return [path.name for path in OutputNames(folder, inputs).claim(names)]


def test_free_names_are_given_in_order_in_the_folder(tmp_path: Path) -> None:
    paths = OutputNames(tmp_path / "out", [tmp_path / "b.png"]).claim(["b.png", "a.png"])
    assert paths == [tmp_path / "out" / "b.png", tmp_path / "out" / "a.png"]


def test_pictures_of_one_stem_get_numbers(tmp_path: Path) -> None:
    names = OutputNames(tmp_path, [])
    claimed = [names.claim(["cat-gradcam.png"])[0].name for _ in range(3)]
    assert claimed == ["cat-gradcam.png", "cat-gradcam-2.png", "cat-gradcam-3.png"]


def test_all_results_of_a_picture_get_the_same_number(tmp_path: Path) -> None:
    names = OutputNames(tmp_path, [])
    names.claim(["cat-1.png"])
    assert [path.name for path in names.claim(["cat-0.png", "cat-1.png"])] == ["cat-0-2.png", "cat-1-2.png"]
    assert [path.name for path in names.claim(["cat-0.png", "cat-1.png"])] == ["cat-0-3.png", "cat-1-3.png"]


def test_an_input_is_never_an_output(tmp_path: Path) -> None:
    (tmp_path / "b.png").touch()  # of an earlier run
    inputs = [tmp_path / name for name in ("a.png", "a-2.png", "a-3.png")]
    assert claim(tmp_path, inputs, "a.png") == ["a-4.png"]
    assert claim(tmp_path, inputs, "b.png") == ["b.png"]


def test_an_input_is_recognised_by_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert claim(Path(), [tmp_path / "a.png"], "a.png") == ["a-2.png"]
    assert claim(tmp_path, [Path("a.png")], "a.png") == ["a-2.png"]
    assert claim(tmp_path, [Path("folder", "..", "a.png")], "a.png") == ["a-2.png"]


def test_an_input_is_recognised_through_links(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    (tmp_path / "link.png").symlink_to("a.png")
    (tmp_path / "link to folder").symlink_to(tmp_path, target_is_directory=True)
    assert claim(tmp_path, [tmp_path / "link.png"], "a.png") == ["a-2.png"]
    assert claim(tmp_path, [tmp_path / "a.png"], "link.png") == ["link-2.png"]
    assert claim(tmp_path / "link to folder", [tmp_path / "a.png"], "a.png") == ["a-2.png"]


def test_an_output_that_took_the_place_of_a_link_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.png").symlink_to("elsewhere.png")
    names = OutputNames(tmp_path, [])
    (path,) = names.claim(["a.png"])
    path.unlink()
    path.touch()
    assert [path.name for path in names.claim(["a.png"])] == ["a-2.png"]


def test_case_does_not_tell_files_apart(tmp_path: Path) -> None:
    names = OutputNames(tmp_path, [tmp_path / "DOG.PNG"])
    claimed = [names.claim([name])[0].name for name in ("Cat.png", "cat.png", "dog.png")]
    assert claimed == ["Cat.png", "cat-2.png", "dog-2.png"]


def test_results_of_one_name_get_numbers_of_their_own(tmp_path: Path) -> None:
    assert claim(tmp_path, [], "a.png", "a.png", "A.png") == ["a.png", "a-2.png", "A-3.png"]
    assert claim(tmp_path, [tmp_path / "a.png"], "a.png", "a.png", "a-3.png") == ["a-2.png", "a-3.png", "a-3-2.png"]


def test_whatever_can_be_written_can_be_read() -> None:
    assert WRITE_SUFFIXES < READ_SUFFIXES
    assert all(suffix == suffix.lower() and suffix.startswith(".") for suffix in READ_SUFFIXES)
