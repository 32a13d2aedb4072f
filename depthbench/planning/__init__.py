"""What a run will hold and compute, from its config alone and before any process starts."""
