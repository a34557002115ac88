"""Agents: the nodes of the graph, thin, in `nodes.py`; `node.py` and `session.py` are what they share."""
