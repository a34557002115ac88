"""Model and plan -> quantized model."""
