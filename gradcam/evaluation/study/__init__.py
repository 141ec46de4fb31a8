"""Studies: evaluate several methods by several metrics on many images, resumable, and write tables and images."""
