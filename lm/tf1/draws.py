"""Random numbers of a TF 1.x program: stateless operations instead of stateful ones.

Each operation draws from a seed of the network's context, so results depend only on the seed, the
step, the call and the rows. In a loop, each iteration has its own seed.
"""

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from lm.model.candidates import sample_candidates


def stateless_operations(seed: Callable[[], tf.Tensor]) -> dict[str, Callable]:
    """Return replacements for the functions of `gen_random_ops`, by name."""

    def uniform(shape, dtype, name=None, **seeds):
        return tf.random.stateless_uniform(shape, seed(), dtype=dtype, name=name)

    def uniform_int(shape, minval, maxval, name=None, **seeds):
        dtype = tf.convert_to_tensor(minval).dtype
        return tf.random.stateless_uniform(shape, seed(), minval, maxval, dtype, name)

    def normal(shape, dtype, name=None, **seeds):
        return tf.random.stateless_normal(shape, seed(), dtype=dtype, name=name)

    def truncated_normal(shape, dtype, name=None, **seeds):
        return tf.random.stateless_truncated_normal(shape, seed(), dtype=dtype, name=name)

    def multinomial(logits, num_samples, output_dtype=tf.int64, name=None, **seeds):
        return tf.random.stateless_categorical(logits, num_samples, seed(), output_dtype, name)

    def shuffle(value, name=None, **seeds):
        return tf.random.experimental.stateless_shuffle(value, seed(), name=name)

    return {
        "random_uniform": uniform,
        "random_uniform_int": uniform_int,
        "random_standard_normal": normal,
        "truncated_normal": truncated_normal,
        "multinomial": multinomial,
        "random_shuffle": shuffle,
    }


def stateless_samplers(seed: Callable[[], tf.Tensor]) -> dict[str, Callable]:
    """Return replacements for the functions of `gen_candidate_sampling_ops`, by name."""

    def sampler(distribution: str) -> Callable:
        def sample(true_classes, num_true, num_sampled, unique, range_max, name=None, **seeds):
            return sample_candidates(
                seed(), true_classes, num_sampled, range_max, unique, distribution
            )

        return sample

    names = ("uniform", "log_uniform")
    return {f"{name}_candidate_sampler": sampler(name) for name in names}


def counting_loop(while_loop: Callable, counts: list[tf.Tensor]) -> Callable:
    """Return `tf.while_loop`, which adds the index of the iteration to `counts` in its body."""

    def counting(
        cond: Callable,
        body: Callable,
        loop_vars: Any,
        shape_invariants: Any = None,
        *arguments: Any,
        return_same_structure: bool = False,
        **options: Any,
    ) -> Any:
        def counting_body(count: tf.Tensor, values: Any) -> tuple[tf.Tensor, Any]:
            counts.append(count)
            try:
                found = body(*values)
            finally:
                counts.pop()
            return count + 1, tf.nest.pack_sequence_as(values, tf.nest.flatten(found))

        _, values = while_loop(
            lambda count, values: cond(*values),
            counting_body,
            (tf.constant(0), loop_vars),
            shape_invariants and (tf.TensorShape([]), shape_invariants),
            *arguments,
            return_same_structure=True,
            **options,
        )
        return values if return_same_structure or len(values) > 1 else values[0]

    return counting


def seed_of_iteration(seed: tf.Tensor, counts: list[tf.Tensor]) -> tf.Tensor:
    """Return a seed (int32 [2]) for the current iterations of the surrounding loops."""
    for count in counts:  # mixed, so that different iterations of two loops do not coincide
        shifted = tf.stack([seed[0] + count, seed[1]])
        seed = tf.random.stateless_uniform([2], shifted, None, None, tf.int32)
    return seed
