"""Sweeps: many runs asked for at once, resumable, and what they came to side by side."""
