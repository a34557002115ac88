"""Pruning: units of a model are found, scored, cut, checked, compensated and recovered.

units       units, tracing: what can be cut; widths: to what, and what a plan requests
score       criteria, moments: which channels go first
cut, gate   prune (the way in), surgery, verify: a copy is cut, and computes what the masked baseline does
compensate  compensation (the way in), folding: made up for without training
recover     recovery: a few epochs of training
"""
