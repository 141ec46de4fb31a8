"""Read and write records, manifests and the settings of a run, on disk or in an object store."""
