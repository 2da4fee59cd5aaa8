"""The network as a TensorFlow graph, from token IDs to the loss.

`windows` builds the graphs of training and evaluation, and `decoding` builds the graph that reads
one word at a time. Both use `network`, which calls the functions of the built-in network (`lstm`)
or of a config file with a `context`. `variables` shares the weights between these graphs.
`network_rules`, `network_check` and `user_errors` find mistakes in the functions of a config file.
`ops` chooses between the compiled ops of `lm.kernels` and TensorFlow's own ops (`plain`).
"""
