"""The ranks: how they start, exchange values, agree on a run, and end if one of them hangs.

`launch.connect` returns the `Communicator` of this process, the only way to exchange values. The
communicator of several ranks uses `horovod`. `agreement` compares the ranks' settings and weights,
`devices` chooses cores and GPUs, `signals` records requests to stop or save, and `supervisor` ends
ranks that hang.
"""
