"""Export of models to ONNX, OpenVINO or Hugging Face folders, choice of a run's candidate, and push to the Hub."""
