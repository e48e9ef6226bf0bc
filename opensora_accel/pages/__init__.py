"""Pages that tools write: figures, tables and charts in one file that needs no network."""
