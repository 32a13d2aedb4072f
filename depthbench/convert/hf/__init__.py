"""The Hugging Face files that travel with an export, as modules of this package: `convert.code` makes the copies."""
