"""Measurement of models, each in a process of its own: races, throughput, memory, latency table and accuracy intervals."""
