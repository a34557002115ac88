"""Profiling: time, memory and parameters per layer of a model, and the time and the evidence of its units."""
