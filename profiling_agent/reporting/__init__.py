"""Reporting: formatting; it owns no numbers."""
