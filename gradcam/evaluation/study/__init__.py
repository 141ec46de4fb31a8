"""Run resumable studies: evaluate several methods by several metrics on many images; write tables and images."""
