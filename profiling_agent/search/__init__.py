"""Search loop, final choice and verdict of a run."""
