"""Child processes of ours: how they are started, spoken to, limited and ended."""
