"""Read the weights in checkpoints without running code in them, fit them to a model's names, and load them."""
