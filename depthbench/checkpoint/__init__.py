"""Checkpoints that any layout can read: saved, published, kept, checked and loaded."""
