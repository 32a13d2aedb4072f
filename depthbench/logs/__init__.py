"""Metrics on their way out: console, JSONL, TensorBoard, Weights & Biases."""
