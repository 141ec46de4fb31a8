"""Models with their preprocessing, labels and default layer. One model is included in the package."""
