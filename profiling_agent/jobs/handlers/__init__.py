"""Handlers: a function of task and context for each job, imported in the process that runs it."""
