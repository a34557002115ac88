"""Tools for torch models that no stage owns. Where a file needs no torch, it says so.

running     inference, hooks, prefix (replay from the layer that changed)
structure   attention, norms, widths, layer_names
measures    complexity, attention_macs, divergence
"""
