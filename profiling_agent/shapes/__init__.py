"""Model and processor -> input shape."""
