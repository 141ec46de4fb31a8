"""The computation, top to bottom: a model and images in, heatmaps out."""
