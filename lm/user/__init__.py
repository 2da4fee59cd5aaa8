"""User-defined networks: the functions of a config file, their audit and their errors.

`functions` is what the rest of the program receives; it imports the other modules when they are
needed, so `--help` does not load TensorFlow. `audit` checks each call of a function while a graph
is built (`results` checks what it returns), `update` calls the functions that take part in the
update, and `trial_run` checks the network by experiment. `errors` and `code` report errors with the
line of the user's file, and `files` has the files that a config file loads.
"""
