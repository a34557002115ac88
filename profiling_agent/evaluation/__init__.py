"""Accuracy, latency and size, each with its interval."""
