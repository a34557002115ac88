"""Runtimes and saved models: a float32 model is brought into a runtime and a scheme, saved, checked and opened without pickle."""
