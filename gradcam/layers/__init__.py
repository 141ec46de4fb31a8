"""Find layers of a model, and lay out their outputs as grids on the image."""
