"""Agents: the nodes of the graph, thin, one file each; `node.py` and `session.py` are what they share."""
