"""The version, on its own, so that whoever writes it down imports nothing else."""

__version__ = "0.3.0"
