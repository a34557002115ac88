"""Child processes: started or forked, exchanging records, limited in time and memory, and ended."""
