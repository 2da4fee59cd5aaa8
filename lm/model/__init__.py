"""From word ids to the loss: the network as a graph, and what it costs.

`windows.build_model` builds it for windows of text, as training and evaluation need it, and
`stepwise` for one word at a time. Both go through `network`: to `lstm`, the built-in one, or to a
config file's, which `guard`, `rules` and `check` look after. `context` is what it is told,
`variables` how its weights are shared. `ops` is the one place that chooses between the compiled ops
and `plain` TensorFlow; `shape` knows the sizes of the built-in weights.
"""
