"""Layers of a model: found by name, and how what they give lies on a grid."""
