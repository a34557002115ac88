"""Jobs: expensive work in child processes with limits, each result computed once and stored on disk."""
