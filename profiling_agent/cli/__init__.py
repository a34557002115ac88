"""Command line of profiling-agent, one file per group of commands."""
