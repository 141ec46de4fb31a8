"""Hooks that leave no trace, for example to record a layer's output and the gradient at this output."""
