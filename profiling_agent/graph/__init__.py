"""LangGraph layer: agents as nodes, their state, the run session and checkpoints."""
