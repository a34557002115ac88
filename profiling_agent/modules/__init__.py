"""Tools for torch models that no stage owns.

running     inference, hooks, prefix (replay from the layer that changed)
structure   norms, layer_names (no torch)
measures    complexity
"""
