"""LangGraph layer: agents as nodes, their state, the run and its checkpoints."""
