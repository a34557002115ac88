"""Measurement: races, throughput, memory and the latency table, each model in a process of its own; intervals of accuracy."""
