"""Saved models: every model that we produce, written, checked and read without pickle."""
