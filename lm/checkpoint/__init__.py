"""Checkpoints: how a run survives a fault, and how its weights are used later."""
