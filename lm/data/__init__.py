"""Convert files to windows of token IDs, without TensorFlow, and identically on all ranks."""
