"""Jobs: expensive work in child processes, with limits; each result is kept on disk and computed once."""
