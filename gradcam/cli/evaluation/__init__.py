"""Commands that ask how far a map can be trusted: evaluate, check and recommend."""
