"""Checkpoints to Hugging Face."""
