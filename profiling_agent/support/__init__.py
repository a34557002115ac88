"""Support: what can be cut of a model and deployed here, found by doing it, before a run. No data set is needed."""
