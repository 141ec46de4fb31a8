"""Studies: methods by metrics over many pictures, resumable, with tables and pictures of what was found."""
