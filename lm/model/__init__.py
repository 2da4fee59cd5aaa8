"""The network as a TensorFlow graph, from token IDs to the loss.

`network` calls the functions of the built-in network (`lstm`) or of a config file with a `context`,
and `output_layer` predicts the words, for large vocabularies with `adaptive` or `candidates`.
`windows` and `decoding` build graphs with a network, which share the weights (`variables`).
`evaluator` computes losses, and `sampler` draws texts. `ops` chooses between the compiled ops of
`lm.kernels` and TensorFlow's own ops (`plain`).
"""
