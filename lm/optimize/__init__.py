"""The update of the weights: exchange the gradients, clip them, and apply them.

`gradients` sums the gradients over the ranks, and `optimizer` applies them with one of the
`algorithms`. `averaging` averages the weights over steps.
"""
