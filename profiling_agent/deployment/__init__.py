"""Deployments: a float32 model brought into a runtime and a scheme, saved, opened, exported."""
