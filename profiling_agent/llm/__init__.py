"""Language model: one reply at a time, and the record of what it was asked."""
