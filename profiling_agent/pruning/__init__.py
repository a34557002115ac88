"""Unpruned model and plan -> pruned model that passed its gates."""
