"""A folder in a store as the place of results: what is written there, and what is said where that cannot be done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gradcam.batch.output.disk import OF_THE_NAME
from gradcam.errors import ImageError, OutputError
from gradcam.stores import Store
from gradcam.stores.failures import describe


@contextlib.contextmanager
def blaming_store(store: Store) -> Iterator[None]:
    """Whatever the store refuses is an `OutputError` that says what to do; a `StoreError` passes."""
    try:
        yield
    except PermissionError as error:
        raise OutputError(
            f"{store}: may not be listed, read or written to with these credentials ({describe(error)}); take others, or "
            "choose another --output"
        ) from error
    except FileNotFoundError as error:
        raise OutputError(
            f"{store}: there is no such bucket, or something went away there ({describe(error)}); look after it, or choose "
            "another --output"
        ) from error
    except (OSError, NotImplementedError) as error:
        raise OutputError(f"{store}: cannot be written to ({describe(error)}); choose another --output") from error


@dataclass(frozen=True)
class Bucket:
    """A folder in a store; a `Place`."""

    store: Store

    def write(self, files: Mapping[str, bytes], views: Mapping[str, bytes]) -> None:
        """As `Place.write`; each object is whole as soon as it is there."""
        written: list[str] = []
        with blaming_store(self.store):
            try:
                for name, data in files.items():
                    written.append(name)  # one that failed may be there after all
                    self.store.write(name, data)
            except OSError as error:
                self.store.remove(written)
                if error.errno in OF_THE_NAME:
                    raise ImageError(f"{name}: this result cannot be written ({describe(error)})") from error
                raise
            self.store.write_all(views)
