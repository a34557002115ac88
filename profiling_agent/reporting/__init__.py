"""Reporting: the report as a record, and its formats; no number is computed here."""
