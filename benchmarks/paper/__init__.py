"""The paper's tables (arXiv 2509.05584): its printed numbers next to its method and ours, measured here."""
