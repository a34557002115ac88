"""Handlers: what does each job, a function of its task and its context; imported in the process that does it."""
