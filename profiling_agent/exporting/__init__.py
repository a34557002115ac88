"""Handover: a model leaves its run, exported as plain files, picked among what was measured, pushed to the Hub."""
