"""Weights from files of any trainer: read without running what is in them, fitted to a model's names, loaded."""
