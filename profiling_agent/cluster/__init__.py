"""Clusters: the same jobs on the machines of a Ray cluster. Only the program of `__main__` and what runs on machines import Ray."""
