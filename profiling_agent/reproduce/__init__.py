"""Reproduction of the paper: its tables on a user's models and data, its numbers, ours, and what was different."""
