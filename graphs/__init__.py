"""Graphs that `langgraph.json` names."""
