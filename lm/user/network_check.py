"""Check by experiment that a network sees no later words, and that windows equal single words."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow.compat.v1 as tf

from lm import logger
from lm.config import Config
from lm.errors import UserError
from lm.functions import NetworkFunctions
from lm.model import decoding
from lm.model.network import Network

_State = Mapping[str, np.ndarray]
_TOLERANCE = 1e-5  # relative to the largest number of a unit; most results are bitwise identical
_ROUNDING = 1e-2  # if shapes, and therefore summation orders, differ; mistakes differ more
_ENLARGED = 5  # factor for weights
_CHECKED = 6  # time steps of a window; each may need a computation of the whole window
_PADDED = 0.25  # share of words that may be padding
_ROWS = 256  # words per computation of probabilities
_MAX_ERROR = 1e-3  # of the sum of all probabilities: some programs add a small number to each
_MIN_NATS = 1e-5  # the rounding of a log-probability in float32


def check_network(
    config: Config,
    vocab_size: int,
    functions: NetworkFunctions,
    session_config: tf.ConfigProto | None = None,
    words: Sequence[str] = (),
    max_words: int = 20_000,
) -> None:
    """Check that no output sees later words and that results are finite and reproducible.

    If a network sees the words that it predicts, or if its probabilities do not sum to 1, its
    perplexity is meaningless. The check warns if single words and windows lead to different
    results. The probabilities of more than `max_words` would take long, so they are not added up.
    """
    with (
        functions.one_line_errors(),
        tf.Graph().as_default(),
        tf.name_scope("lm_check"),  # lm/inference/trained_run.py has a name scope, too
        tf.Session(config=session_config) as session,
    ):
        check = NetworkCheck(Network(config, vocab_size, functions, words))
        num_threads = session_config.inter_op_parallelism_threads if session_config else 1
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        check.check_window(session, num_threads)
        if functions.has_losses and vocab_size <= max_words:
            check.check_probabilities(session)
        disagreement = check.find_disagreement(session)
        if not disagreement:
            # With small weights, a network hardly depends on the words before the last word. With
            # large weights, rounding errors grow from word to word.
            kernels = [v for v in tf.trainable_variables() if v.shape.rank > 1]
            session.run([v.assign(_ENLARGED * v, read_value=False) for v in kernels])
            disagreement = check.find_disagreement(session, _CHECKED)
        if disagreement:
            logger.warning(disagreement)


class NetworkCheck:
    """The graphs of a check: windows [num_steps, 2], and single words in one row, in float32."""

    def __init__(self, network: Network):
        self._network, self._num_steps = network, network.config.num_steps
        self._random = np.random.default_rng(network.config.seed)
        self._inputs_ph, self._targets_ph = _placeholders(self._num_steps, 2)
        self._state_phs = {
            name: tf.placeholder(dtype, [2, *shape])
            for name, (shape, dtype) in network.state_parts.items()
        }
        self._zeros: _State = {
            name: np.zeros(ph.shape, ph.dtype.as_numpy_dtype)
            for name, ph in self._state_phs.items()
        }
        context, words = network.context(num_rows=2), (self._inputs_ph, self._targets_ph)
        if network.has_losses:
            _, self._losses, after = network.losses(*words, self._state_phs, context)
            self._results = self._losses[:, :, None], after
        else:
            self._results = network.build(self._inputs_ph, self._state_phs, context)
            _, self._losses = network.cross_entropy(self._results[0], self._targets_ph, context)
        self._word_phs = _placeholders(None, 1)  # generation and scoring process single rows
        self._word_state_ph = tf.placeholder(tf.float32, [1, decoding.state_size(network)])
        ways: list[decoding.Losses] = [decoding.window_losses]
        if network.has_losses and network.predicts:
            ways.append(decoding.window_losses_from_predictions)
        self._by_word = [
            decoding.continued_log_probs(network, *self._word_phs, self._word_state_ph, way)[0]
            for way in ways
        ]

    def _run(
        self, session: tf.Session, words: Sequence[np.ndarray], state: _State
    ) -> tuple[np.ndarray, _State, np.ndarray]:
        """Return the results, the state and the losses of inputs and targets [num_steps, 2].

        All calls compute the same tensors, because TensorFlow compiles the graph for each set.
        """
        feed = {self._state_phs[name]: value for name, value in state.items()}
        feed |= dict(zip((self._inputs_ph, self._targets_ph), words))
        return session.run([*self._results, self._losses], feed)

    def _run_words(
        self,
        session: tf.Session,
        words: np.ndarray,
        first: int = 0,
        state: _State | None = None,
    ) -> list[np.ndarray]:
        """Return the losses of words [T + 1, 1] from time step `first` on.

        Only for a network with `reads_words`, `first` may be above 0. Such a network reads these
        words together. The first row of `state` is the state before the words, by default zeros.
        """
        size = decoding.state_size(self._network)
        before = decoding.state_of_words(words[:first, 0].tolist(), size)
        if state:
            before = np.concatenate([each[0].ravel().view(np.float32) for each in state.values()])
        feed = dict(zip(self._word_phs, (words[first:-1], words[first + 1 :])))
        feed[self._word_state_ph] = [before]
        return [-log_probs for log_probs in session.run(self._by_word, feed)]

    def check_window(self, session: tf.Session, num_threads: int = 1) -> None:
        """Check for NaN, random numbers, and outputs that see later words; changes the weights."""
        where, vocab_size = self._network.where, self._network.vocab_size
        _check_finite(where, *self._run_words(session, np.zeros([3, 1])))
        _replace_zeros(session, self._network.config.init_scale)
        words = self._random.integers(0, vocab_size, [2, self._num_steps, 2])
        # Some programs compute the length of a row from the words 0, as if they were padding.
        words[self._random.random(words.shape) < _PADDED] = 0
        # Use a state that the network computed: other states may be invalid.
        first, state, _ = self._run(session, words, self._zeros)
        top, after, _ = self._run(session, words, state) if state else (first, state, None)
        _check_finite(where, first, *state.values(), top, *after.values())

        def depends_on_words_from(now: int) -> bool:
            """Whether other words from a time step on change the outputs before this step."""
            changed = words.copy()
            changed[:, now:, 0] = (changed[:, now:, 0] + 1) % vocab_size
            changed[:, now:, 1] = 0
            return _differ(top[:now], self._run(session, changed, state)[0][:now])

        if depends_on_words_from(self._num_steps):  # the words are equal
            raise UserError(
                f"{where} computes different results each time, so it cannot be checked: use"
                " context.dropout or context.seed() for all random numbers"
            )
        with ThreadPoolExecutor(num_threads) as threads:
            if any(threads.map(depends_on_words_from, self._time_steps())):
                raise UserError(
                    f"{where}: the outputs of a time step depend on later words, which the network"
                    " must predict"
                )

    def _time_steps(self) -> list[int]:
        """Return the first, the last, and random time steps, at most `_CHECKED`.

        If attention is limited to blocks of a window, the first or the last step is usually inside
        a block.
        """
        steps = np.arange(1, self._num_steps)
        chosen = self._random.permutation(steps[1:-1])[: _CHECKED - 2]
        return sorted({*steps[:1], *steps[-1:], *chosen})

    def check_probabilities(self, session: tf.Session) -> None:
        """Check that the probabilities of all words after the same words sum to 1."""
        network, vocab_size = self._network, self._network.vocab_size
        words_ph, targets_ph = (tf.placeholder(tf.int32, [_ROWS]) for _ in range(2))
        state_ph = tf.placeholder(tf.float32, [_ROWS, decoding.state_size(network)])
        losses, after = decoding.next_loss(network, words_ph, targets_ph, state_ph)
        # With small weights, all probabilities are equal, and smoothed losses seem to be exact.
        of_words = [v for v in tf.trainable_variables() if vocab_size in v.shape.as_list()]
        session.run([v.assign(10 * v, read_value=False) for v in of_words])
        feed = {state_ph: np.zeros(state_ph.shape), targets_ph: np.zeros(_ROWS)}
        for word in self._random.integers(0, vocab_size, 3):
            feed[words_ph] = np.full(_ROWS, word)
            feed[state_ph] = session.run(after, feed)
        total = 0.0
        for first in range(0, vocab_size, _ROWS):
            feed[targets_ph] = np.arange(first, first + _ROWS) % vocab_size
            nats = session.run(losses, feed)[: vocab_size - first]
            with np.errstate(over="ignore"):
                total += np.exp(-nats, dtype=np.float64).sum()
        if not abs(total - 1) < _MAX_ERROR:
            raise UserError(
                f"{network.where}: without context.training, the probabilities exp(-loss) of all"
                f" words sum to {total:.6g}, not 1: build_losses must return the exact negative"
                " log-likelihood in nats"
            )

    def find_disagreement(self, session: tf.Session, num_words: int | None = None) -> str:
        """Return a message if single words and windows lead to different losses, otherwise "".

        With `num_words`, a network without `reads_words` is compared only at the first words after
        the first window.
        """
        num_windows = 1 if self._network.reads_words else 2  # a state carries words between them
        size = [num_windows * self._num_steps + 1, 2]
        words = self._random.integers(0, self._network.vocab_size, size)
        starts = range(0, len(words) - 1, self._num_steps)
        windows = [[words[i : i + self._num_steps] for i in (start, start + 1)] for start in starts]
        of_windows, states = [], [self._zeros]
        for window in windows:
            _, state, losses = self._run(session, window, states[-1])
            of_windows.append(losses)
            states.append(state)
        of_window = np.concatenate(of_windows)[:, :1]
        # Subtract the mean, about log V, which is large compared to the effect of initial weights.
        mean = of_window[np.isfinite(of_window)].mean()
        if self._network.reads_words:  # Each word needs the computation of a window.
            first = max(0, self._num_steps - _CHECKED)
            steps = range(first, self._num_steps)
            each = [self._run_words(session, words[: step + 2, :1], step) for step in steps]
            by_word = list(map(np.concatenate, zip(*each)))
        else:
            first = self._num_steps if num_words else 0
            last = first + num_words if num_words else len(of_window)
            state = states[first // self._num_steps]
            by_word = self._run_words(session, words[first : last + 1, :1], state=state)
            of_window = of_window[:last]
        if not any(
            _differ(of_window[first:] - mean, of_word - mean, _ROUNDING, floor=_MIN_NATS)
            for of_word in by_word
        ):
            return ""
        _, _, without_state = self._run(session, windows[-1], self._zeros)
        if self._zeros and not _differ(of_windows[-1], without_state):
            return (
                f"{self._network.where} ignores its state ({', '.join(self._zeros)}), so each"
                " window starts without it: use it (with tf1.load, pass it to tf1.fed)"
            )
        return (
            f"{self._network.where} computes different results for single words and for windows of"
            f" {self._num_steps}, so lm.score, lm.generate and lm.export would compute a different"
            " model than lm.evaluate; use the state for all information about previous words, or"
            " let reads_words(config) return the number of words that the network looks at"
        )


def _placeholders(num_steps: int | None, rows: int) -> list[tf.Tensor]:
    return [tf.placeholder(tf.int32, [num_steps, rows]) for _ in range(2)]


def _replace_zeros(session: tf.Session, scale: float) -> None:
    """Replace initial weights of zero, which would hide the values that they are multiplied by."""
    assign_ops = []
    for i, variable in enumerate(tf.trainable_variables()):
        # Use positive values: the network may compute a square root of the weight.
        values = tf.random.uniform(variable.shape, 0, scale, variable.dtype.base_dtype, seed=i)
        replaced = tf.where(tf.equal(variable, 0), values, variable)
        assign_ops.append(variable.assign(replaced, read_value=False))
    session.run(assign_ops)


def _check_finite(where: str, *found: np.ndarray) -> None:
    for value in found:
        if not (value < np.inf).all():  # false for NaN; -inf is the logarithm of a probability of 0
            raise UserError(f"{where}: with its initial weights, not all results are finite")


def _differ(
    first: np.ndarray, second: np.ndarray, tolerance: float = _TOLERANCE, floor: float = 0.0
) -> bool:
    if not first.size:
        return False
    # Compare each unit (index of the last axis) on the scale of this unit, but small units on the
    # median scale: a unit with large numbers must not hide the differences of small units.
    sizes = np.where(np.isfinite(first), np.abs(first), 0).max(axis=tuple(range(first.ndim - 1)))
    close = np.maximum(tolerance * np.maximum(sizes, np.median(sizes)), floor)
    with np.errstate(invalid="ignore"):  # differences of equal infinities
        return not ((first == second) | (np.abs(first - second) <= close)).all()  # true for NaN
