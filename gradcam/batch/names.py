"""Whether results can be written as they are asked for, none over another or over an input: found out before work begins."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from gradcam.cam.methods.table import METHODS
from gradcam.errors import GradcamError, OutputError, join_names, shorten
from gradcam.images.files import LONGEST_NAME, cut, join_name, to_plain
from gradcam.options import FORMATS, SAVED, check_choice, check_count, check_number
from gradcam.sources.contents import Item, find_url
from gradcam.storage.output import to_reader
from gradcam.storage.records import Explained
from gradcam.storage.store import Store

if TYPE_CHECKING:
    from gradcam.attributions.table import AttributionMethod
    from gradcam.batch.findings import MapResult, Request
    from gradcam.cam.methods.base import Method

COMPARISON = "compare"  # in place of a method, in the name of a panel


def list_endings(request: Request, results: Sequence[MapResult], *, stem: str = "", suffix: str = ".png") -> list[str]:
    """List the file name of each result of one image, or what follows the stem if there is no stem.

    The name says what is explained if that was named or if there are several, and the layer if there are several. With a
    stem, a result on another image has that image's stem.
    """
    entries = [result.entry for result in results]
    says_target = _names_target(request.target) or len({_identify(entry) for entry in entries}) > 1
    maps = _list_map_methods(request)
    methods: list[Method | AttributionMethod] = [*maps, *request.attributions]
    layered = {each.name for each in methods if each.has_layer} if len(request.layers) > 1 else set()
    signed = {each.name for each in maps}
    names = []
    for entry in entries:
        evidence = name_evidence(entry.evidence) if entry.method in signed else None
        words = [entry.method, *(_name_thing(entry, stem) if says_target else [])]
        words += [to_plain(entry.layer)] if entry.method in layered else []
        words += [] if evidence is None else [evidence]
        own = PurePath(entry.like or "").stem if entry.on and stem else stem
        names.append(join_name(own, "".join(f"-{word}" for word in words) + suffix))
    return names


def _names_target(target: Any) -> bool:
    """Return whether a target names what is explained, so that a later run may name something else."""
    from gradcam.targets.boxes import Box  # here, since names are checked before PyTorch is imported
    from gradcam.targets.classes import ClassTarget
    from gradcam.targets.keypoints import Keypoint
    from gradcam.targets.masks import Mask
    from gradcam.targets.words import Token

    if isinstance(target, ClassTarget):
        return target.classes is not None
    if isinstance(target, Box):
        return target.numbers != [0] or target.edge is not None or target.class_ is not None
    if isinstance(target, Keypoint):
        return target.numbers != [0] or target.axis is not None or target.box != 0
    if isinstance(target, Mask):
        return target.class_ is not None or target.mask is not None
    return target is not None and not (isinstance(target, Token) and target.position is None)


def _list_map_methods(request: Request) -> list[Method]:
    """Those that make maps; all there are where nobody named any, and the target has its own."""
    return list(request.methods) or ([] if request.attributions else list(METHODS.values()))


def _identify(entry: Explained) -> tuple[object, ...]:
    """What tells the things apart that results of one picture are of."""
    place = entry.box if entry.missed else None
    own = (entry.number, entry.mask, entry.text, entry.like, entry.on, entry.word, entry.keypoint)
    return entry.index, entry.label, place, *own


def _name_thing(entry: Explained, stem: str = "") -> list[str]:
    """What a result is of, as words of its name. `stem`: the picture's own, where the name begins with another one's."""
    if entry.kind == "class":
        parts = [
            None if entry.index is None else str(entry.index),
            None if entry.label is None else to_plain(entry.label),
        ]
        return [part for part in parts if part is not None]
    if entry.kind == "like":
        other = to_plain(PurePath(entry.like or "").stem)
        return ["like", to_plain(stem)] if entry.on and stem else ["like", other, *([entry.on] if entry.on else [])]
    number = next((it for it in (entry.number, entry.word, entry.keypoint) if it is not None), "")
    label = "" if entry.kind == "keypoint" else entry.text or entry.label
    place = ",".join(f"{side:.0f}" for side in entry.box or ()) if entry.missed else entry.mask
    details = [place if place != "predicted" else None, label, entry.edge or entry.axis]
    return [f"{entry.kind}{number}", *(to_plain(detail) for detail in details if detail)]


def panel_ending(evidence: str, *, suffix: str) -> str:
    """What follows the stem in the name of a panel."""
    kind = name_evidence(evidence)
    return f"-{COMPARISON}-{kind}{suffix}" if kind else f"-{COMPARISON}{suffix}"


def name_evidence(evidence: str) -> str | None:
    """The kind of evidence, for a name that says it where it is not the usual one."""
    return None if evidence == "positive" else evidence


def name_result(stem: str, ending: str) -> str:
    """A result's name, relative to the output folder; `stem` may have folders. One that is too long is cut, and gets a
    hash of all of it, so that no other picture's results are called alike."""
    folders, slash, name = stem.rpartition("/")
    room = LONGEST_NAME - len(os.fsencode(ending))
    if len(os.fsencode(name)) > room:
        mark = "-" + hashlib.sha256(os.fsencode(name)).hexdigest()[:8]
        name = cut(name, room - len(mark)) + mark
    return folders + slash + name + ending


def name_page(stem: str) -> str:
    """The name of a picture's page, which is never that of the gallery."""
    is_gallery = stem.casefold() == "index"
    return name_result(stem, "-page.html" if is_gallery else ".html")


HEATMAP = "heatmap"  # behind the name of an overlay
MAP_SUFFIX = ".npy"


@dataclass(frozen=True)
class Saving:
    """What is written of each result, and how. `kinds`: keys of `options.SAVED`; "map" is the raw values as NumPy's
    float32. `quality`, 1 to 100, is of jpg and webp. `views`: whether a report's are written as well."""

    kinds: tuple[str, ...] = ("overlay",)
    format: str = "jpg"
    quality: int = 90
    alpha: float = 0.5
    colormap: str = "turbo"
    views: bool = False

    def __post_init__(self) -> None:
        from gradcam.images.draw import find_colormap

        if not self.kinds or not set(self.kinds) <= set(SAVED):
            raise GradcamError(f"The outputs to save are {shorten(self.kinds)}, expected some of {join_names(SAVED)}.")
        check_choice(self.format, "The format", FORMATS)
        check_count(self.quality, "quality", "a whole number from 1 to 100.", most=100)
        check_number(self.alpha, "alpha", "an opacity from 0 to 1.", most=1)
        find_colormap(self.colormap)

    @property
    def suffix(self) -> str:
        return f".{self.format}"


def name_kinds(overlay: str, saving: Saving) -> dict[str, str]:
    """The name of each kind of file that is asked for, but the panel, beside an overlay of that name."""
    base = overlay.removesuffix(saving.suffix)
    names = {"overlay": overlay, "heatmap": f"{base}-{HEATMAP}{saving.suffix}", "map": f"{base}{MAP_SUFFIX}"}
    return {kind: name for kind, name in names.items() if kind in saving.kinds}


def name_files(
    stem: str, request: Request, results: Sequence[MapResult], saving: Saving, *, suffix: str
) -> list[dict[str, str]]:
    """As `name_kinds`, of each result of one picture."""
    overlays = list_endings(request, results, stem=stem, suffix=suffix)
    return [name_kinds(overlay, saving) for overlay in overlays]


def check_outputs(
    folder: Path | Store,
    items: Sequence[Item],
    stems: Mapping[str, str],
    *,
    saving: Saving,
    request: Request,
    others: Sequence[Path] = (),
) -> None:
    """Raises `OutputError` where two pictures' results could have one name, or an input lies where results go and is
    called like one, and as `check_panel`. `stems`: as `plan_stems` gives them. `others`: what is read beside the
    pictures."""
    check_panel(saving, request)
    methods: list[Method | AttributionMethod] = [*_list_map_methods(request), *request.attributions]
    made = [each.name.casefold() for each in methods]
    names = {stems[item.name].casefold(): item.name for item in items}
    # The other method of "cat-guided" may be called as the end of "guided-gradcam" is, of "cat".
    inner = {one.removesuffix(f"-{other}") for one in made for other in made if one.endswith(f"-{other}")}
    for stem, name in names.items():
        for other, rest in _divide(stem) if inner else ():
            if other in names and rest in inner:
                raise OutputError(
                    f"{names[other]} and {name}: their results would have the same name; rename one image, or use two "
                    "output folders"
                )
    places: dict[str, list[str]] = {}  # where results go, whatever links lead there
    for parent in {stem.rpartition("/")[0] for stem in stems.values()}:
        place = folder.below(parent).url if isinstance(folder, Store) else os.path.realpath(folder / parent)
        places.setdefault(place.casefold(), []).append(parent.casefold())
    starts = (*made, COMPARISON) if "panel" in saving.kinds else tuple(made)
    suffixes = {MAP_SUFFIX if kind == "map" else saving.suffix for kind in saving.kinds}
    for path, above, file in _list_places(items, folder, others):
        for parent in places.get(above, ()):
            stem, suffix = os.path.splitext(f"{parent}/{file}" if parent else file)
            rests = [rest for other, rest in _divide(stem) if other in names] if suffix in suffixes else []
            if any(rest == start or rest.startswith(f"{start}-") for rest in rests for start in starts):
                raise OutputError(
                    f"{path}: a result in {to_reader(folder).show()} would replace this image; choose another --output"
                )


def check_panel(saving: Saving, request: Request) -> None:
    """Raises `GradcamError` where a panel is asked for, and there are no maps to put on it."""
    unfit = [each.name for each in request.methods or request.attributions if not request.methods or not each.has_layer]
    if "panel" in saving.kinds and unfit:
        raise GradcamError(
            f"A panel needs heatmaps at a layer, but {unfit[0]} has no layer: leave out the panel, or {unfit[0]}."
        )


def _list_places(
    items: Iterable[Item], folder: Path | Store, others: Sequence[Path]
) -> Iterator[tuple[Path | str, str, str]]:
    for url in () if isinstance(folder, Path) else filter(None, map(find_url, items)):
        above, _, name = url.rpartition("/")
        yield url, above.casefold(), name.casefold()
    resolve = cache(os.path.realpath)  # of a folder, once
    read = [*others, *filter(None, (item.content.path for item in items))]
    for path in read if isinstance(folder, Path) else ():
        yield path, resolve(path.parent).casefold(), path.name.casefold()
        if path.is_symlink():
            above, name = os.path.split(os.path.realpath(path))
            yield path, above.casefold(), name.casefold()


def _divide(stem: str) -> Iterator[tuple[str, str]]:
    """At each of its dashes."""
    words = stem.split("-")
    for many in range(1, len(words)):
        yield "-".join(words[:many]), "-".join(words[many:])


ENDING = 150  # bytes of what is put behind a stem: method, class, layer, kind and suffix
NUMBER = 8  # bytes of "-" and a number
LONGEST_FOLDERS = 700  # bytes; paths end at 1024 on some systems
# What Windows, and disks that come from there, do not take, characters that steer terminals, and bytes that are not UTF-8.
UNSAFE = re.compile('[<>:"|?*\\\\\x00-\x1f\x7f\ud800-\udfff]')


def plan_stems(items: Iterable[Item], *, ending: int = ENDING) -> dict[str, str]:
    """For each item's name the path below the output folder that its results' names begin with: `<folders>/<stem>`. It
    is the name without its suffix. Where two pictures would have the same, case and Unicode's forms aside, each gets
    its suffix, `<stem>-<suffix>`, and where that is taken as well a number, from 2. Other pictures make no difference,
    nor does any order. Stems and folders that are too long are cut, and end in a hash of the whole. `ending`: how many
    bytes may follow a stem, so that the name fits and need not be cut again."""
    room = LONGEST_NAME - ending - NUMBER
    stems = {item.name: _to_stem(item.name, room, with_suffix=False) for item in items}
    shared = _find_shared(stems)
    taken = {_fold(stem) for name, stem in stems.items() if name not in shared} if shared else set()
    own = {name: _to_stem(name, room, with_suffix=True) for name in shared}
    still_shared = _find_shared(own) | {name for name, stem in own.items() if _fold(stem) in taken}
    taken |= {_fold(own[name]) for name in shared - still_shared}
    numbers = {_fold(own[name]): count(2) for name in still_shared}
    for name in sorted(still_shared):
        wish = own[name]
        while _fold(own[name]) in taken:
            own[name] = f"{wish}-{next(numbers[_fold(wish)])}"
        taken.add(_fold(own[name]))
    return stems | own


def _find_shared(stems: dict[str, str]) -> set[str]:
    counts = Counter(map(_fold, stems.values()))
    return {name for name, stem in stems.items() if counts[_fold(stem)] > 1} if len(counts) < len(stems) else set()


def _fold(text: str) -> str:
    """What is the same for names that some file system takes for the same (Unicode 3.13, D145: canonical caseless)."""
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", text).casefold())


def _to_stem(name: str, room: int, *, with_suffix: bool) -> str:
    *folders, file = [part for part in name.split("/") if part] or [""]
    stem, suffix = posixpath.splitext(file)
    if with_suffix and suffix:
        stem = f"{stem}-{suffix[1:]}"
    path = "/".join(_shorten(_make_safe(folder).rstrip(". ") or "_", LONGEST_NAME) for folder in folders)
    if len(path.encode()) > LONGEST_FOLDERS:
        path = _hash(path)
    return posixpath.join(path, _shorten(_make_safe(stem), room))


def _make_safe(part: str) -> str:
    plain = UNSAFE.sub("_", part)
    return "_" if plain in ("", ".", "..") else plain


def _shorten(text: str, most: int) -> str:
    """At most so many bytes of it, the last of which are of a hash of all of it; a character is not cut in two."""
    encoded = text.encode()
    if len(encoded) <= most:
        return text
    mark = f"-{_hash(text)}"
    return encoded[: most - len(mark)].decode(errors="ignore") + mark


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
