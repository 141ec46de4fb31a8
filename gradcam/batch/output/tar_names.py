"""What results are called in a WebDataset: samples by keys without dots, and their fields."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

RECORD = "json"  # the field of a sample's record


def plan_keys(stems: Mapping[str, str]) -> dict[str, str]:
    """For each picture's name the key of its sample: its stem, with "_" for dots, which end a key in a WebDataset.

    `stems`: as `plan_stems` gives them. Where two would be alike, case aside, one that had dots gets a number, from 2.
    """
    plain = {name: stem for name, stem in stems.items() if "." not in stem.rpartition("/")[2]}
    keys = dict(plain)
    taken = {stem.casefold() for stem in plain.values()}
    for name in sorted(stems.keys() - plain.keys()):
        folders, slash, last = stems[name].rpartition("/")
        wish = key = folders + slash + last.replace(".", "_")
        numbers = count(2)
        while key.casefold() in taken:
            key = f"{wish}-{next(numbers)}"
        taken.add(key.casefold())
        keys[name] = key
    return keys


def name_field(stem: str, file: str) -> str:
    """The field of a sample that a file is: what stands behind the stem in its name, such as `gradcam.jpg`.

    In lower case, as the library reads all fields. A picture's files have names that differ in more than case.
    """
    if file.startswith(f"{stem}-"):
        return file[len(stem) + 1 :].lower()
    return file.rpartition("/")[2].lower()  # its name was cut, and has a hash of all of it
