"""A training run, from its config to its test. `run.train` is the entry point."""
