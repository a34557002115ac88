"""Quantization: layers of a model are replaced by ones with fewer bits.

layers       layers, cuda_linear; kinds: which class stands for which layer, and its bytes
quantize     quantize (the way in): layers are replaced; tune: all below, for int8
calibrate    calibrate: the ranges of layers' inputs, batch norms folded, biases corrected
sensitivity  sensitivity: what one layer costs
"""
