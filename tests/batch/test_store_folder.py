"""Test which URLs can be the output folder of a run."""

from __future__ import annotations

import pytest

from gradcam.batch.formats.store_folder import check_store
from gradcam.errors import OutputError
from gradcam.storage.store import Store


def test_a_folder_in_a_store_always_exists() -> None:
    store = Store("memory://bucket/out")
    assert check_store(store)
    store.write("object", b"content")
    with pytest.raises(OutputError, match="is an object, expected a folder for the results"):
        check_store(Store("memory://bucket/out/object"))
