"""User-defined networks: the functions of a config file, their audit and their errors.

`config_functions` imports the other modules when they are needed, so `--help` does not load
TensorFlow. `audit` checks each call of a function while a graph is built, and `returned` checks its
result. `rounding` rounds the factors of matrix products to bfloat16. `update` calls the functions
that take part in the update. `network_check` checks the network by experiment. If a user's code
fails, `failures` and `code` find the line for the error message. `loaded_files` records the files
that a config file loads.
"""
