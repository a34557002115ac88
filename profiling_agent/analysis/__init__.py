"""Profile -> plan."""
