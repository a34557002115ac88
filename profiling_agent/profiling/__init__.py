"""Profiling: time, memory and parameters per layer of a model, and the evidence on its units."""
