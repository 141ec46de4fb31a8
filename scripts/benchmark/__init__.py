"""The sections of `scripts/bench`, one module each, and the modules that they share."""
