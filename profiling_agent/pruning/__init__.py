"""Pruning: units of a model are found, scored, cut, checked, compensated and recovered.

units       units, tracing, attention: what can be cut; widths: to what, and what a plan requests
score       criteria: which channels go first
cut, gate   prune (the way in), verify: a copy is cut, and computes what the masked baseline does
compensate  compensation: made up for without training
recover     recovery: a few epochs of training
"""
