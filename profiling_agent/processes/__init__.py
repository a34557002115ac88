"""Child processes: started or forked, spoken to in records, limited and ended."""
