"""Torch tools that no stage owns. Where a file needs no torch, it says so."""
