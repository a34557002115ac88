"""Timing: races, throughput, memory, the headline and the latency table, each model in a process of its own."""
