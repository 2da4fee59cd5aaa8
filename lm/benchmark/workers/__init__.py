"""The processes that measure: each is started once, and stands still while another one runs.

`process` is the benchmark's side: it starts a worker, alone or as ranks under mpirun, lets
one of them run at a time and asks it. `__main__` is the worker's side: it builds a server of
`servers` and answers. What they train is in `ours` and in `lm/benchmark/peers/`.
"""
