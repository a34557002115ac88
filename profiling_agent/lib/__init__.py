"""Library without knowledge of models: files, the machine, third-party code and progress."""
