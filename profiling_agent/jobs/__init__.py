"""Expensive work in child processes, with limits."""
