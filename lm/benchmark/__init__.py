"""How fast a training step is, what it is compared with, and whether more ranks pay off.

One module for each command (`step`, `scaling`, `exchange`, `advise`), which `measure`s a record,
`show`s it as a table and `draw`s it; their flags are in `options`. Measurements are made in
processes of their own (`workers/`), in turn, so that drift of the machine meets all contestants
alike; other programs that train the same model are in `peers/`.
"""
