"""Convert text to token IDs and back.

`text` reads files in blocks. `tokenizers` defines the interface and the default tokenizer, `words`.
`symbols` defines the tokenizers `characters`, `bytes` and `ids`, and `subwords` loads tokenizers
from files. `vocabulary` selects the words of a model, and `selection` finds the tokenizer of a run.
"""
