"""Shared parts of the commands: the parser, the start and end of a program, and text tables."""
