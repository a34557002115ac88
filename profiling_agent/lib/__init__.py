"""Tools below every stage: files, the machine, third-party code and progress."""
