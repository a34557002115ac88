"""Save and load any model we produce, without pickle."""
