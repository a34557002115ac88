"""Tools for torch models that no stage owns; `layer_names` imports no torch."""
