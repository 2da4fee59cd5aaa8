"""Use of a trained run: evaluation, text generation, scoring, and export.

`trained_run` opens a run. `evaluation`, `scorer` and `generator` compute with it. `sampling`,
`beam` and `prompts` belong to the generator, and `lines` and `nbest` read texts for the scorer.
`saved_model`, `weights` and `tf1_checkpoint` write exports.
"""
