"""Use of a trained run: evaluation, text generation, scoring, and export."""
