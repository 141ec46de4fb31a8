"""Choose the names of results, and check before a run that no result overwrites another result or an input."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, product
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from gradcam.cam.methods.table import METHODS
from gradcam.errors import GradcamError, OutputError, join_names, shorten
from gradcam.images.files import MAX_NAME_BYTES, join_name, to_safe_name, truncate_bytes
from gradcam.options import BOX_THRESHOLD, FORMATS, LOOK_OPTIONS, OUTPUT_KINDS, check_boxes, check_choice, check_count
from gradcam.storage.records import Explained

if TYPE_CHECKING:
    from gradcam.attributions.table import AttributionMethod
    from gradcam.batch.image_results import ExplainRequest, ExplanationResult
    from gradcam.cam.methods.base import Method
    from gradcam.sources.contents import InputImage
    from gradcam.storage.store import Store

# For each target class, the fields that select what to explain, and their default values. The keys are names of
# classes, because file names are checked before PyTorch is imported.
DEFAULT_TARGETS: dict[str, dict[str, Any]] = {
    "ClassTarget": {"classes": None},
    "Box": {"numbers": [0], "edge": None, "class_": None},
    "Keypoint": {"numbers": [0], "axis": None, "box": 0},
    "Mask": {"class_": None, "mask": None},
    "Token": {"position": None, "word": None, "say": None, "against": None},
}
COMPARISON_NAME = "compare"  # The name of a panel contains this word instead of a method.


def list_endings(
    request: ExplainRequest, results: Sequence[ExplanationResult], *, stem: str = "", suffix: str = ".png"
) -> list[str]:
    """Return the file name of each result of one image. If `stem` is empty, return only the part after the stem.

    The name includes the target if the user chose a target, or if the image has several targets. The name includes the
    layer if several layers are requested. If `stem` is given, the name of a result on a reference image begins with the
    reference image's stem.
    """
    entries = [result.entry for result in results]
    includes_target = _names_target(request.target) or len({_identify_target(entry) for entry in entries}) > 1
    methods_with_layer = {method.name for method in _list_methods(request) if method.has_layer}
    attributions = {method.name for method in request.attributions}
    names = []
    for entry in entries:
        words = [entry.method, *(_describe_target(entry, stem) if includes_target else [])]
        if len(request.layers) > 1 and entry.method in methods_with_layer:
            words.append(to_safe_name(entry.layer))
        evidence = "" if entry.method in attributions else name_evidence(entry.evidence)
        entry_stem = PurePath(entry.like or entry.on).stem if entry.on and stem else stem
        names.append(join_name(entry_stem, "".join(f"-{word}" for word in words) + evidence + suffix))
    return names


def _names_target(target: Any) -> bool:
    """Return True if the user chose a target. Names then include the target, so that runs can use different targets."""
    defaults = DEFAULT_TARGETS.get(type(target).__name__)
    if target is None or defaults is None:
        return target is not None
    values = ((getattr(target, name), default) for name, default in defaults.items())
    return any(value is not None if default is None else value != default for value, default in values)


def _list_methods(request: ExplainRequest) -> list[Method | AttributionMethod]:
    """Return the requested methods. If no method is requested, return all CAM methods, because any method may run."""
    return [*request.methods, *request.attributions] or [*METHODS.values()]


def _identify_target(entry: Explained) -> tuple[object, ...]:
    """Return the fields that distinguish the targets of one image's results."""
    place = entry.box if entry.missed else None
    identifiers = (entry.number, entry.mask, entry.text, entry.like, entry.on, entry.word, entry.keypoint)
    return entry.index, entry.label, place, *identifiers


def _describe_target(entry: Explained, stem: str = "") -> list[str]:
    """Return the words that describe a result's target in its name.

    `stem` is the stem of the explained image. Only results on the reference image use `stem`, because their names begin
    with the reference image's stem.
    """
    if entry.kind == "class":
        index, label = entry.index, entry.label
        return [*([] if index is None else [str(index)]), *([] if label is None else [to_safe_name(label)])]
    if entry.kind == "like" and entry.on and stem:
        return ["like", to_safe_name(stem)]
    if entry.kind == "like":
        return ["like", to_safe_name(PurePath(entry.like or "").stem), *([entry.on] if entry.on else [])]
    image = ["with", stem] if stem else ["on", PurePath(entry.on or "").stem]
    placed = [] if entry.on is None else list(map(to_safe_name, image))
    number = next((value for value in (entry.number, entry.word, entry.keypoint) if value is not None), "")
    label = "" if entry.kind == "keypoint" else entry.text or entry.label
    place = ",".join(f"{side:.0f}" for side in entry.box or ()) if entry.missed else entry.mask
    details = [place if place != "predicted" else None, label, entry.edge or entry.axis]
    return [*placed, f"{entry.kind}{number}", *(to_safe_name(detail) for detail in details if detail)]


def panel_suffix(evidence: str, *, suffix: str) -> str:
    """Return the part of a panel's name after the stem."""
    return f"-{COMPARISON_NAME}{name_evidence(evidence)}{suffix}"


def name_evidence(evidence: str) -> str:
    """Return the part of a file name for the kind of evidence, such as "-negative". Return "" for "positive"."""
    return "" if evidence == "positive" else f"-{evidence}"


def name_result(stem: str, ending: str) -> str:
    """Return the name of a result relative to the output folder. `stem` may contain folders.

    If the name is too long, it is shortened. A hash of the full name keeps the short name unique.
    """
    folders, slash, name = stem.rpartition("/")
    max_bytes, digest = MAX_NAME_BYTES - len(os.fsencode(ending)), hashlib.sha256(os.fsencode(name)).hexdigest()[:8]
    return folders + slash + _shorten(name, max_bytes, lambda _: digest) + ending


def name_page(stem: str) -> str:
    """Return the name of an image's HTML page. The name is never `index.html`, which is the gallery's name."""
    return name_result(stem, "-page.html" if stem.casefold() == "index" else ".html")


HEATMAP_ENDING = "heatmap"  # The name of a heatmap is the name of its overlay with this ending.
KIND_SUFFIXES = {"map": ".npy", "mask": ".png"}  # Other kinds have the format that the user chose.


@dataclass(frozen=True)
class OutputOptions:
    """The files to write for each result, and their settings.

    `kinds` are keys of `options.OUTPUT_KINDS`. The kind "map" writes the raw values as a float32 NumPy array. `quality`
    (1 to 100) applies to jpg and webp. If `views` is True, the images of a report are written as well. If `alpha`,
    `colormap` or `blend` is None, the default for `base` is used. `box_threshold` and `box_method` apply to the kinds
    "mask" and "boxes", as in `images.regions.find_boxes`.
    """

    kinds: tuple[str, ...] = ("overlay",)
    format: str = "jpg"
    quality: int = 90
    alpha: float | None = None
    colormap: str | None = None
    views: bool = False
    base: str = "gray"
    blend: str | None = None
    box_threshold: float = BOX_THRESHOLD
    box_method: str = "largest"

    def __post_init__(self) -> None:
        from gradcam.images.draw import fill_look

        if not self.kinds or not set(self.kinds) <= set(OUTPUT_KINDS):
            expected = join_names(OUTPUT_KINDS)
            raise GradcamError(f"The outputs to save are {shorten(self.kinds)}, expected some of {expected}.")
        check_choice(self.format, "The format", FORMATS)
        check_count(self.quality, "quality", "a whole number from 1 to 100.", most=100)
        check_boxes(self.box_threshold, self.box_method)
        for name, value in fill_look(**{name: getattr(self, name) for name in LOOK_OPTIONS}).items():
            object.__setattr__(self, name, value)

    @property
    def look(self) -> dict[str, Any]:
        """Return the options of `gradcam.overlay` for the overlays and panels."""
        return {name: getattr(self, name) for name in LOOK_OPTIONS}

    @property
    def appearance(self) -> dict[str, Any]:
        """Return the settings of overlays, masks and boxes, by name."""
        return self.look | {"box_threshold": self.box_threshold, "box_method": self.box_method}

    @property
    def suffix(self) -> str:
        return f".{self.format}"


def name_kinds(overlay: str, saving: OutputOptions) -> dict[str, str]:
    """Return the file names of the requested outputs, except the panel, by their keys in a record.

    `overlay` is a file name.
    """
    base = overlay.removesuffix(saving.suffix)
    names = {"overlay": overlay, "heatmap": f"{base}-{HEATMAP_ENDING}{saving.suffix}"}
    names |= {"map": f"{base}{KIND_SUFFIXES['map']}", "mask_file": f"{base}-mask{KIND_SUFFIXES['mask']}"}
    return {key: name for key, name in names.items() if key.removesuffix("_file") in saving.kinds}


def check_outputs(
    folder: Path | Store,
    items: Sequence[InputImage],
    stems: Mapping[str, str],
    *,
    saving: OutputOptions,
    request: ExplainRequest,
    others: Sequence[Path] = (),
) -> None:
    """Raise `OutputError` if two results could have the same name, or if a result could overwrite an input.

    Also raises the error of `check_kinds`. `stems` is the return value of `plan_stems`. `others` are input files that
    are not images, such as lists.
    """
    from gradcam.storage.output import to_reader  # Imported here, because most callers of this module need no stores.

    check_kinds(saving, request)
    method_names = [method.name.casefold() for method in _list_methods(request)]
    names = {stems[item.name].casefold(): item.name for item in items}
    # The result of "gradcam" for the image "cat-guided" and the result of "guided-gradcam" for the image "cat" would
    # have the same name.
    pairs = product(method_names, [f"-{name}" for name in method_names])
    nested_endings = {name.removesuffix(ending) for name, ending in pairs if name.endswith(ending)}
    for stem, name in names.items():
        for prefix, ending in _split_at_dashes(stem) if nested_endings else ():
            if prefix in names and ending in nested_endings:
                problem = f"{names[prefix]} and {name}: their results would have the same name"
                raise OutputError(f"{problem}; rename one image, or use two output folders")
    output_folders: dict[str, list[str]] = {}  # The keys are real paths, because folders may be symbolic links.
    for parent in {stem.rpartition("/")[0] for stem in stems.values()}:
        output_folder = os.path.realpath(folder / parent) if isinstance(folder, Path) else folder.below(parent).url
        output_folders.setdefault(output_folder.casefold(), []).append(parent.casefold())
    panel_names = [COMPARISON_NAME] * ("panel" in saving.kinds)
    starts = tuple(f"{name}-" for name in (*method_names, *panel_names))
    suffixes = {KIND_SUFFIXES.get(kind, saving.suffix) for kind in saving.kinds if kind != "boxes"}
    for path, input_folder, file in _list_places(items, folder, others):
        for parent in output_folders.get(input_folder.casefold(), ()):
            stem, suffix = posixpath.splitext(posixpath.join(parent, file.casefold()))
            endings = (f"{ending}-" for prefix, ending in _split_at_dashes(stem) if prefix in names)
            if suffix in suffixes and any(ending.startswith(starts) for ending in endings):
                problem = f"{path}: a result in {to_reader(folder).show()} would replace this image"
                raise OutputError(f"{problem}; choose another --output")


def check_kinds(saving: OutputOptions, request: ExplainRequest) -> None:
    """Raise `GradcamError` if one of the methods cannot make a requested output.

    A panel needs heatmaps at a layer. Masks and boxes need heatmaps.
    """
    methods = request.methods or request.attributions
    unsuitable = [method.name for method in methods if not request.methods or not method.has_layer]
    if "panel" in saving.kinds and unsuitable:
        name = unsuitable[0]
        problem = f"A panel needs heatmaps at a layer, but {name} has no layer"
        raise GradcamError(f"{problem}: leave out the panel, or {name}.")
    if request.attributions and not {"mask", "boxes"}.isdisjoint(saving.kinds):
        name = request.attributions[0].name
        raise GradcamError(f"Masks and boxes need heatmaps, but {name} attributes scores to pixels: use a CAM method.")


def _list_places(
    items: Iterable[InputImage], folder: Path | Store, others: Sequence[Path]
) -> Iterator[tuple[Path | str, str, str]]:
    from gradcam.sources.contents import get_store_url

    for url in () if isinstance(folder, Path) else filter(None, map(get_store_url, items)):
        yield url, *url.rpartition("/")[::2]
    resolve = cache(os.path.realpath)  # Resolve each folder only once.
    input_paths = [*others, *filter(None, (item.content.path for item in items))]
    for path in input_paths if isinstance(folder, Path) else ():
        yield path, resolve(path.parent), path.name
        if path.is_symlink():
            yield path, *os.path.split(os.path.realpath(path))


def _split_at_dashes(stem: str) -> Iterator[tuple[str, str]]:
    """Yield the parts before and after each dash of the stem."""
    words = stem.split("-")
    for length in range(1, len(words)):
        yield "-".join(words[:length]), "-".join(words[length:])


# A stem leaves room for the rest of a name, which contains the method, class, layer, kind and suffix.
MAX_ENDING_BYTES = 150
MAX_NUMBER_BYTES = 8  # A stem also leaves room for a dash and a number.
MAX_STEM_BYTES = MAX_NAME_BYTES - MAX_ENDING_BYTES - MAX_NUMBER_BYTES
MAX_FOLDERS_BYTES = 700  # Some systems limit paths to 1024 bytes.
# Matches characters that Windows rejects, control characters, and surrogates, which stand for bytes that are not UTF-8.
UNSAFE_CHARACTERS = re.compile('[<>:"|?*\\\\\x00-\x1f\x7f\ud800-\udfff]')


def plan_stems(items: Iterable[InputImage]) -> dict[str, str]:
    """Return the stem of each item, which is the common beginning of its result names in the output folder.

    A stem is `<folders>/<name without suffix>`. If several items would get equal stems, ignoring case and Unicode
    forms, each item gets `<stem>-<suffix>`. If another item already has this stem, a number from 2 is added. A
    stem depends neither on the order of the items nor on items with other stems. If the name of a stem or of a folder
    is too long, the name is shortened, and ends in a hash of the full name.
    """
    stems = {item.name: _to_stem(item.name, with_suffix=False) for item in items}
    collisions = _find_collisions(stems)
    used_stems = {_fold_case(stem) for name, stem in stems.items() if name not in collisions} if collisions else set()
    unique = {name: _to_stem(name, with_suffix=True) for name in collisions}
    still_colliding = {name for name, stem in unique.items() if _fold_case(stem) in used_stems}
    still_colliding |= _find_collisions(unique)
    used_stems |= {_fold_case(unique[name]) for name in collisions - still_colliding}
    numbers = {_fold_case(unique[name]): count(2) for name in still_colliding}
    for name in sorted(still_colliding):
        base = unique[name]
        while _fold_case(unique[name]) in used_stems:
            unique[name] = f"{base}-{next(numbers[_fold_case(base)])}"
        used_stems.add(_fold_case(unique[name]))
    return stems | unique


def _find_collisions(stems: dict[str, str]) -> set[str]:
    counts = Counter(map(_fold_case, stems.values()))
    return {name for name, stem in stems.items() if counts[_fold_case(stem)] > 1} if len(counts) < len(stems) else set()


def _fold_case(text: str) -> str:
    """Return a key that is equal for names that a file system may treat as equal.

    The key implements canonical caseless matching (Unicode 3.13, D145).
    """
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", text).casefold())


def _to_stem(name: str, *, with_suffix: bool) -> str:
    *folders, file = [part for part in name.split("/") if part] or [""]
    stem, suffix = posixpath.splitext(file)
    if with_suffix and suffix:
        stem = f"{stem}-{suffix[1:]}"
    path = "/".join(_shorten(_make_safe(folder).rstrip(". ") or "_", MAX_NAME_BYTES) for folder in folders)
    if len(path.encode()) > MAX_FOLDERS_BYTES:
        path = _hash(path)
    return posixpath.join(path, _shorten(_make_safe(stem), MAX_STEM_BYTES))


def _make_safe(part: str) -> str:
    plain = UNSAFE_CHARACTERS.sub("_", part)
    return "_" if plain in ("", ".", "..") else plain


def _shorten(text: str, max_bytes: int, hash_text: Callable[[str], str] | None = None) -> str:
    """Shorten a text that has more than `max_bytes` bytes, and append a hash of the full text.

    The text is cut between two characters.
    """
    if len(os.fsencode(text)) <= max_bytes:
        return text
    hash_ending = f"-{(hash_text or _hash)(text)}"
    return truncate_bytes(text, max_bytes - len(hash_ending)) + hash_ending


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
