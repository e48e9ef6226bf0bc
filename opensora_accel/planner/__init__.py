"""Before a job starts: what fits, how fast, and why."""
