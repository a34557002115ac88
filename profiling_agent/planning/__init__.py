"""Analysis: from a profile to a plan, by rules or a language model, and what a plan would do."""
