"""Pipeline parallelism: which blocks a stage holds, what crosses each edge, and how it gets there."""
