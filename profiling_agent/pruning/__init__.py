"""Structured pruning: units of a model are found, scored, cut, verified, compensated and recovered.

Trace        tracing: the channels that layers write, transform and read together, followed through one forward pass
Unit         units: layers that are cut together; widths: the widths that a unit may have, and a plan's cuts
Elimination  criteria: which channels of a unit go first, and what that costs
Pruned       prune: attention heads, and a copy with the cuts, which computes what the baseline does with them masked
Compensated  compensation: the cut made up for by least squares, and recovered by a few epochs of training
"""
