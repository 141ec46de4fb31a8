"""Kinds of values that options take."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import click

from gradcam.batch.failures import FailureLimit, parse_limit
from gradcam.batch.inputs.shards import Shard, parse_shard
from gradcam.choices import LAYOUTS, to_fit
from gradcam.errors import GradcamError, join_names
from gradcam.stores import Store, to_place
from gradcam.stores.store import EXTRAS


class Values(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in some versions
    """Numbers with commas between them."""

    name = "numbers"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> tuple[float, ...]:
        try:
            return tuple(float(number) for number in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no number, nor several with commas between them.", parameter, context)


class Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # as above
    """Pixels: one number, or height x width, or depth x height x width of a volume."""

    name = "size"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> int | tuple[int, ...]:
        sides = re.fullmatch(r"[1-9]\d{0,4}(\s*[x×]\s*[1-9]\d{0,4}){0,2}", str(value).strip(), re.ASCII | re.IGNORECASE)
        if sides is None:
            self.fail(f"{value!r} is no size: expected a side, 224, or height x width, 320x240.", parameter, context)
        size = tuple(map(int, re.findall(r"\d+", sides[0], re.ASCII)))
        return size if len(size) > 1 else size[0]


class Fits(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # as above
    """What of a picture the network is shown."""

    name = "fit"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        try:
            return str(to_fit(value))
        except GradcamError as error:
            self.fail(str(error), parameter, context)


class Weights(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # as above
    """A file that is there, or a word, which may be the name of some of the model's own weights."""

    name = "weights"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        if re.fullmatch(r"(\w+_Weights\.)?\w+", str(value)) and not Path(value).exists():
            return Path(value)
        file = click.Path(exists=True, dir_okay=False, path_type=Path)
        return Path(file.convert(value, parameter, context))


class Opacity(click.FloatRange):
    """From 0 to 1; click lets NaN through, which is neither below nor above."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        number = float(super().convert(value, parameter, context))
        if math.isnan(number):
            self.fail(f"{value} is not a number from 0 to 1.", parameter, context)
        return number


def find_reshape(context: click.Context, parameter: click.Parameter, text: str | None) -> str | tuple[int, ...] | None:
    """What `--reshape` says: a grid, or a layout's name."""
    if text is None or text.replace("-", " ") in LAYOUTS:
        return text
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", text):
        raise click.BadParameter(
            f"{text!r} is neither a grid, such as 14x14, nor one of {join_names(LAYOUTS)}.", context, parameter
        )
    return tuple(map(int, text.split("x")))


class Limit(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # as above
    """How many pictures may fail: a number, or a share with %."""

    name = "limit"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> FailureLimit:
        try:
            return value if isinstance(value, FailureLimit) else parse_limit(value)
        except GradcamError as error:
            self.fail(str(error), parameter, context)


class Share(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # as above
    """A share of the pictures: I/N."""

    name = "share"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Shard:
        try:
            return value if isinstance(value, Shard) else parse_shard(value)
        except GradcamError as error:
            self.fail(str(error), parameter, context)


class Folder(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # as above
    """A folder on a disk, or in a store by its URL."""

    name = "folder"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path | Store:
        if isinstance(value, (Path, Store)):
            return value
        scheme, colon, rest = str(value).partition(":/")
        if colon and scheme in EXTRAS and not rest.startswith("/"):
            self.fail(f"{value!r} is no URL: {scheme}:// has two slashes.", parameter, context)
        return to_place(value)
