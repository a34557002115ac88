"""Planning: from a profile to a plan, by rules or by the LLM, and a prediction of what a plan does."""
