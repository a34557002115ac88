"""Formatting: owns no numbers."""
