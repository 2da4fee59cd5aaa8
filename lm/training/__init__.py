"""A run from its first step to its test: one loop, and a module for each thing that it does.

`loop.train` is what others call. `optimizer` builds the update, `saving` and `restore` keep the
run safe, `validation` evaluates it, and `progress` is how far it is, which checkpoints carry.
"""
