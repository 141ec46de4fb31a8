"""List input images from files, folders, lists, archives and object stores."""
