"""Pruning: units of a model are found, scored, cut, checked, compensated and recovered.

units       units, chains, following, operations, spaces: what can be cut; widths, patterns: to what, and what a plan asks
score       criteria, importance, elimination, moments: which channels go first
cut, gate   prune (the way in), surgery, gate: a copy is cut, and computes what the masked baseline does
compensate  compensation (the way in), least_squares, folding, consumers, calibration: made up for without training
recover     recovery (the way in), recovery_state: a few epochs of training
"""
