"""A command for continuous integration."""

COMMAND = None
