"""Quantization: layers of a model are replaced by ones with fewer bits.

layers       module (the base), linear, static, cast, cuda_linear; kinds: which class stands for which layer
quantize     quantize (the way in), norms: batch norms are folded, layers replaced; tune: all below, for int8
calibrate    calibrate: the ranges of layers' inputs
smooth       smoothing: SmoothQuant, site by site
sensitivity  sensitivity: what one layer costs
footprint    footprint: bytes
vnni         vnni: which processors add int8 products in 32 bits, for which runtime
"""
