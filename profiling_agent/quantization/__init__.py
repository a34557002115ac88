"""Quantization: layers of a model are replaced by ones with fewer bits, calibrated and tuned on images."""
