"""Places beyond this machine's disks: object stores, and whatever else fsspec reads and writes by its URL."""

from gradcam.stores.addresses import is_url, to_path
from gradcam.stores.store import Store, to_place

__all__ = ["Store", "is_url", "to_path", "to_place"]
