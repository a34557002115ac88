"""Acquisition: from a request to a model, its image processor and disjoint splits of a data set."""
