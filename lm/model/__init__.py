"""From word ids to the loss: the network as a graph, and what it costs.

`windows.build_model` builds it for windows of text, as training and evaluation need it, and
`stepwise` for one word at a time; both are made of `network`, `lstm`, `softmax` and `dropout`.
`ops` is the one place that chooses between the compiled ops and `plain` TensorFlow, `shape` the
one that knows the sizes of the weights.
"""
