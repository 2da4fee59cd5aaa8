"""Use of a trained run: evaluation, text generation, scoring, and export.

`trained_run` opens a run. `evaluation`, `scorer` and `generator` compute with it. The generator
selects tokens with `sampling` and `beam`. `prompts` converts prompts to tokens, and tokens to text.
`lines` reads texts for the commands, and `nbest` selects from n-best lists. `saved_model`,
`weights` and `tf1_checkpoint` write exports, which `export_path` renames when they are complete.
"""
