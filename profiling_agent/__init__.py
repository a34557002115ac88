"""Agents that measure, prune and quantize a vision model until a contract is met."""
