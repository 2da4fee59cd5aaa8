"""Shared parts of the commands: the parser, the start and end of a program, and text tables.

A command parses its flags with `flags.parse`. `program.run` executes a command on several ranks,
and `program.run_alone` executes a command that is a single process.
"""
