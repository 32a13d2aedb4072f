"""What an exported model is worth: lm-evaluation-harness tasks, and the negative log-likelihood of six domains."""
