"""Shapes: the input shape of a model, by rules and a forward pass."""
