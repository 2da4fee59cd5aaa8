"""What the commands have in common: flags, the start and the end of a program, tables of text.

A command makes its `flags.Flags`, and hands its work to `program.run`, on all ranks, or to
`program.run_alone`, on one process.
"""
