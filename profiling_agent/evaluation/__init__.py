"""Evaluation: predictions on disk, and intervals of what is counted on them."""
