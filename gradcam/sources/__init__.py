"""Input images: files, folders, lists, archives and object stores, as one ordered list."""
