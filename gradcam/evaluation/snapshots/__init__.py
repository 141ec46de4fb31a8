"""Snapshots of a model's results on images, for comparing two checkpoints, precisions or quantisations."""
