"""Ray: the engine that runs models in processes of a cluster or of this machine."""
