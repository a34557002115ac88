"""Shared tools for torch models: inference, hooks, prefix replay, batch norms, layer names and complexity."""
