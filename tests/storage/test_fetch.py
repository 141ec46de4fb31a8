"""Test archives in a store, and the errors of images and archives that cannot be read."""

from __future__ import annotations

import errno

import pytest

from gradcam.errors import ImageError
from gradcam.storage.fetch import StoreArchive, translate_image_store_errors
from gradcam.storage.store import Store
from tests.stores import objects


def test_an_archive_is_read_from_its_start_to_its_end() -> None:
    with objects():
        Store("objects://bucket/").write("a.tar", bytes(range(256)) * 500)
        with StoreArchive("objects://bucket/a.tar").read_on() as file:
            assert file.read() == bytes(range(256)) * 500


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError(errno.ENOENT, "no such key"), "The archive does not exist"),
        (PermissionError(errno.EACCES, "403"), "The archive cannot be read: the store denies access"),
        (OSError(errno.EIO, "down"), "The archive cannot be opened"),
    ],
)
def test_errors_of_the_store_are_image_errors(error: OSError, message: str) -> None:
    with pytest.raises(ImageError, match=message), translate_image_store_errors("The archive "):
        raise error


def test_an_error_of_a_decompressor_is_no_error_of_the_store() -> None:
    with pytest.raises(OSError, match="not a gzipped file") as caught, translate_image_store_errors("The archive "):
        raise OSError("not a gzipped file")
    assert not isinstance(caught.value, ImageError)
