"""The evaluation of a network over the local rows."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tqdm import tqdm

from lm import logger
from lm.data.batches import EvalBatches, Rows, eval_rows_of_rank
from lm.model.network import Network
from lm.model.windows import Run, WindowRunner, build_window_graph
from lm.perplexity import NllSum

_UNITS_PER_NAT = 2.0**40
_NOT_FINITE_NATS = 2.0**60  # exp(loss / tokens) overflows for up to 10^15 tokens
_LOG_SECONDS = 50.0  # less than the silence after which `Heartbeat` logs the activity


class Evaluator:
    """The evaluation graph of a network for the local rows.

    If `shared`, the rows are distributed over all ranks. Otherwise, rank 0 evaluates all rows.
    """

    def __init__(
        self,
        network: Network,
        eos_id: int,
        rank: int,
        size: int,
        shared: bool,
        num_threads: int = 1,
    ):
        self._config, self._eos_id, self._num_threads = network.config, eos_id, num_threads
        # The operations of user-defined networks must have the same shapes on any number of ranks.
        group = network.micro_batch_rows
        num_rows = self._config.eval_batch_size
        self._rows = eval_rows_of_rank(num_rows, rank, size, shared, group or 1)
        # A rank without rows builds the graph too, but never runs it. Some networks reject one row.
        built = Rows(0, group or self._rows.count or num_rows)
        self._graph = build_window_graph(network, built, "eval")

    def run(
        self,
        run: Run,
        name: str,
        ids: np.ndarray,
        gather: Callable[[Any], list],
        poll: Callable[[], None] = lambda: None,
    ) -> NllSum:
        """Evaluate int32 token IDs, and return the sum over all ranks.

        Ranks without rows wait in `gather`, which returns the values of all ranks. `poll` is called
        after each window. `name` is the name of the text in the log. `run` is `session.run`, or a
        replacement.
        """
        logger.info("evaluating %s: %s tokens", name, f"{len(ids):,}")
        own, config = (0, 0), self._config
        if self._rows.count:
            sizes = config.eval_batch_size, config.num_steps
            batches = EvalBatches(ids, *sizes, self._eos_id, self._rows)
            runner = WindowRunner(self._graph, self._rows, self._num_threads)
            own = run_evaluation(run, runner, batches, poll)
        units, tokens = map(sum, zip(*gather(own)))
        return sum_of_units(units, tokens)


def units_of(nlls: np.ndarray) -> int:
    """Return the sum of losses in nats as an integer, in units of 2^-40 nats.

    The sum of integers is the same in any order, so it does not depend on the number of ranks.
    """
    # A value that is not finite becomes so large that the perplexity is not finite either.
    finite = np.nan_to_num(nlls, nan=_NOT_FINITE_NATS, posinf=_NOT_FINITE_NATS)
    return sum(map(int, np.rint(finite * _UNITS_PER_NAT)))


def sum_of_units(units: int, tokens: int) -> NllSum:
    """Return the sum of losses for results of `units_of`."""
    return NllSum(units / _UNITS_PER_NAT, tokens)


def run_evaluation(
    run: Run, runner: WindowRunner, batches: EvalBatches, poll: Callable[[], None]
) -> tuple[int, int]:
    """Run an evaluation over windows, and return the sum (see `units_of`) and the tokens."""
    units = tokens = 0
    begun = logged_at = time.monotonic()
    for index in range(batches.num_windows):
        inputs, targets, mask = batches.window(index)
        parts = runner.run(run, runner.graph.nll_TB, inputs, targets, {})
        counted = np.concatenate(parts, axis=1)[mask].astype(np.float64)
        units += units_of(counted)
        tokens += len(counted)
        poll()
        if (now := time.monotonic()) - logged_at > _LOG_SECONDS:
            logged_at, done = now, (index + 1) / batches.num_windows
            left = tqdm.format_interval((now - begun) * (1 / done - 1))
            logger.info(f"evaluated {done:.0%}, left {left}")
    return units, tokens
