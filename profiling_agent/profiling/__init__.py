"""Profiling: where the time, memory and parameters of a model are, and the evidence on its units."""
