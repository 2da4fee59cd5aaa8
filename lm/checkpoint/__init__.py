"""What a run leaves on disk so that it can go on, or be used, after anything that may happen.

`writer` saves checkpoints in the background, and `run_dir.open_run_dir` finds the one to resume
from. `format` writes and reads the files of one checkpoint, `manifest` says what they hold,
`verification` whether they are whole, `choice` which of a run to use or to keep, and `variables`
moves arrays in and out of a session.
"""
