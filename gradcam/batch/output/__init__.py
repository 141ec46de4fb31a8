"""What comes of it: results, names and records, in a folder, in a store or in tars; and what earlier runs left there."""
