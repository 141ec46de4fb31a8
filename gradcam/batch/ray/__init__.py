"""Ray: the engine whose models are in processes of a cluster, or of this machine."""
