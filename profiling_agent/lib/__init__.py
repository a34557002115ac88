"""Library: files, the machine, third-party code and progress; it knows nothing of models."""
