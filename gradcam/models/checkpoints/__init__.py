"""Read a checkpoint's weights without running its code, rename the weights for a model, and load the weights."""
