"""Measurement of models, each in a process of its own: races, throughput, memory, predictions and intervals."""
