"""Convert text to token IDs and back.

`text` reads files in blocks. `tokenizers` defines the interface and `words`, `symbols` the other
small tokenizers, and `subwords` reads tokenizers from files. `vocabulary` selects words, and
`selection` finds the tokenizer of a run.
"""
