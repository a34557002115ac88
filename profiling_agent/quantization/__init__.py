"""Quantization: layers of a model are replaced by ones with fewer bits.

layers       layers, cuda_linear; kinds: which class replaces which layer, and its bytes
quantize     quantize (the entry point): layers are replaced; tune: all below, for int8
calibrate    calibrate: ranges of layers' inputs, batch-norm folding, bias correction
sensitivity  sensitivity: the cost of quantizing each layer
"""
