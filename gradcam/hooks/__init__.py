"""Hooks on a model that leave no trace: what a layer gives, and the gradient that comes back to it."""
