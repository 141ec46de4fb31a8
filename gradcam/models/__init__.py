"""Models with all that is theirs: preprocessing, labels, default layer. One comes with the package."""
