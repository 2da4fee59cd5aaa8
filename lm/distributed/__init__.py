"""The ranks: how they are started, what passes between them, and how none waits for ever.

`launch.connect` returns this process's `Communicator`, with Horovod behind it where there are
several ranks; the rest of the program has no other way to exchange. `mpirun` starts ranks,
`agreement` keeps them at the same run, `waiting`, `watchdog` and `signals` end what cannot go on,
and `devices`, `cores` and `gpus` tell what each rank computes on.
"""
