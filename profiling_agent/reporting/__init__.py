"""Report of a finished run as a record, and its output formats; no number is computed here."""
