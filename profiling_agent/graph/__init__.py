"""Graph: the agents as LangGraph nodes (`nodes.py`), their state, the run session that they share, and checkpoints."""
