"""Structured pruning: units of a model are found, scored, cut, verified, compensated and recovered.

units       units, tracing, attention: what can be cut; widths: aligned widths, and the cuts that a plan requests
score       criteria: which channels go first
cut, gate   prune (the entry point), verify: a copy is cut, and computes what the masked baseline does
make up     compensation: by least squares; recovery: by a few epochs of training
"""
