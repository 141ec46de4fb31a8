"""Define the version in a module without imports, so that the build can read it without the package."""

__version__ = "0.3.0"
