"""Graphs: the one that `langgraph.json` names."""
