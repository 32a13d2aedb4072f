"""Runs on several nodes under Slurm: submitted, started, requeued and resumed."""
