"""The PDF has one page, three images of the requested size, and the text; the probabilities are right."""

import re
import zlib
from pathlib import Path

from common import ASSETS, run_check

EXPECTED = {"Egyptian cat": 58, "espresso": 11}


def check(answer):
    path = Path("figure.pdf")
    probabilities = answer.draw(ASSETS / "cat_and_espresso.jpg", list(EXPECTED), path)
    percents = [round(float(value) * 100) for value in probabilities]
    assert all(abs(a - b) <= 1 for a, b in zip(percents, EXPECTED.values())), f"the probabilities are {percents} %"
    data = path.read_bytes()
    assert data.startswith(b"%PDF"), "figure.pdf is no PDF"
    pages = len(re.findall(rb"/Type\s*/Page\b", data))
    assert pages == 1, f"the PDF has {pages} pages"
    images = [entry for entry in re.findall(rb"<<(?:[^<>]|<<[^<>]*>>)*>>", data) if b"/Subtype /Image" in entry]
    sizes = [max(read_number(entry, side) for side in (b"Width", b"Height")) for entry in images]
    assert sum(size >= 300 for size in sizes) >= 3, f"the longer sides of the images are {sizes}"
    text = "".join(read_text(data).split())
    for name, percent in zip(EXPECTED, percents):
        assert "".join(name.split()) in text, f"the figure does not name {name}"
        assert f"{percent}%" in text, f"the figure does not contain {percent} %"


def read_number(entry, key):
    return int(re.search(rb"/" + key + rb"\s+(\d+)", entry).group(1))


def read_text(data):
    """Return the literal strings of all content streams."""
    text = ""
    for stream in re.findall(rb"stream\r?\n(.*?)\r?\nendstream", data, re.S):
        try:
            content = zlib.decompress(stream)
        except zlib.error:
            content = stream
        if b"BT" in content:
            strings = re.findall(rb"\(((?:[^()\\]|\\.)*)\)", content)
            text += b"".join(strings).decode("latin-1")
    return text


if __name__ == "__main__":
    run_check(check)
