"""Shortcuts: evidence that only one class has, such as a watermark, found by clustering heatmaps and features."""
