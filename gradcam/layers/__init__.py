"""Find layers of a model by name, and the grid of their output."""
