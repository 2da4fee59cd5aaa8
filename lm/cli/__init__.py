"""Shared parts of the commands: the parser, the start and end of a program, and text tables.

A command parses its flags with `flags.parse`. It passes its work to `program.run` if it runs on
several ranks, and to `program.run_alone` if it is a single process.
"""
