"""Models with their preprocessing, labels and default layers. One model is included in the package."""
