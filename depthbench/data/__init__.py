"""Text to token files and back: tokenizers, readers, ``prepare``, checks of prepared files, imported streams."""
