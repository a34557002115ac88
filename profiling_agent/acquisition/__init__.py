"""Request -> model, processor and three disjoint splits."""
