"""A paper's tables, a user's models and data -> the paper's numbers, ours, and what was different."""
