"""Convert text to token IDs and back: tokenizers and their vocabularies."""
