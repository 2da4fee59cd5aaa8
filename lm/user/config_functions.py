"""The functions of a config file, as the rest of the program uses them.

The modules that need TensorFlow are imported when a graph is built.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from lm.config import Config
from lm.errors import UserError
from lm.functions import VIRTUAL_RANKS, Audit, NetworkFunctions
from lm.options import replaced


class UserFunctions(NetworkFunctions):
    """The functions of a config file that defines a network."""

    def resolve(self, config: Config) -> Config:
        for field in ("tie_weights", "adaptive_softmax_cutoffs"):
            for function in ("build_logits", "build_losses"):
                if getattr(config, field) and function in self.by_name:
                    raise UserError(
                        f"{self.where} builds its own output layer, so {field} has no effect:"
                        f" define build_outputs instead of {function}"
                    )
        most = math.gcd(VIRTUAL_RANKS, config.batch_size)
        count = config.virtual_ranks or most
        if config.batch_size % count:
            raise UserError(
                f"virtual_ranks {count} does not divide batch_size {config.batch_size}, which the"
                f" network of {self.where} needs: use virtual_ranks {most}"
            )
        return replaced(config, virtual_ranks=count)

    def call(self, function: Callable, *arguments: Any) -> Any:
        """Call a function of the file; if it fails, the error names the line of the file."""
        from lm.user import failures

        return failures.call(self.where, function, *arguments)

    def checkpoint_name(self, weight: str) -> str:
        if "checkpoint_name" not in self.by_name:
            return weight
        name = self.call(self.by_name["checkpoint_name"], weight)
        if not isinstance(name, str):
            raise UserError(
                f"{self.where}: checkpoint_name({weight!r}) must return a str, not {name!r}"
            )
        return name

    def audit(self, network: Any) -> Audit:
        from lm.user.audit import UserAudit

        return UserAudit(network)

    def one_line_errors(self, running: bool = False) -> contextlib.AbstractContextManager:
        from lm.user import failures

        return failures.one_line_errors(self.where, running)

    def check(
        self, config: Config, vocab_size: int, session_config: Any, words: Sequence[str]
    ) -> None:
        from lm.user.network_check import check_network

        check_network(config, vocab_size, self, session_config, words)
