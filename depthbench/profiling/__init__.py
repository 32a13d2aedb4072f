"""Measuring what a run really does."""
