"""Runs as YAML: strict, typed, merged by group, overridden from the command line."""
