"""How a model is executed and timed."""
