"""Export: a model leaves its run as plain files, ONNX or a Hugging Face folder, is picked among the candidates, or is pushed to the Hub."""
