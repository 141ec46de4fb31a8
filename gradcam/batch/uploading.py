"""Copying pictures to a CUDA device beside what it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gradcam.batch.shortage import is_out_of_memory
from gradcam.classifiers import Prepared

Upload = Callable[[Tensor], Tensor]


def find_upload(device: torch.device) -> Upload | None:
    """A function for threads that brings a picture's tensor to the device; None where that has nothing to gain."""
    return Uploader(device) if device.type == "cuda" else None


class Uploader:
    """Copies from pinned memory on a stream of its own, which runs beside the computation's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, image: Tensor) -> Tensor:
        """The tensor on the device, wholly there; the same one where the device, or pinned memory, has no room now."""
        if image.device.type != "cpu":
            return image
        try:
            with torch.cuda.stream(self._stream):
                uploaded = image.pin_memory().to(self._device, non_blocking=True)
                self._stream.synchronize()  # only the calling thread waits
                return uploaded
        except RuntimeError as error:  # of the pinned memory, which is the machine's, there is no kind of its own
            if not is_out_of_memory(error):
                raise
            return image


def receive(picture: Prepared, device: torch.device) -> Prepared:
    """An uploaded picture for the stream that computes; one that had no room is brought to the device now."""
    if device.type != "cuda":
        return picture
    if picture.image.device.type == "cuda":
        # Otherwise its memory could be given to the next upload while this stream has yet to read it.
        picture.image.record_stream(torch.cuda.current_stream(picture.image.device))
        return picture
    return replace(picture, image=picture.image.to(device))
