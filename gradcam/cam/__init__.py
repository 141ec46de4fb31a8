"""Compute heatmaps from a model and images."""
