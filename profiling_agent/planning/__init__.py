"""Planning: plans from a profile, by rules or by the LLM, and predictions of their effect."""
