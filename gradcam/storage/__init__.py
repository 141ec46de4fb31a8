"""What lies on a disk or in a store: records, manifests, settings of a run, and how they are read and written."""
