"""Runtimes and saved models: conversion of float32 models, saving, checking and opening without pickle."""

# Importing a runtime registers it.
from profiling_agent.runtimes import onnx_runtime as onnx_runtime
from profiling_agent.runtimes import open_vino as open_vino
from profiling_agent.runtimes import torch_session as torch_session
