"""Shortcuts: evidence that one class has and no other, such as a watermark, found by clustering maps and what they mark."""
