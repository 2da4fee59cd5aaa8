"""The interface between the program and the functions that build a network.

This module has the built-in network, which needs no checks. `lm/user/` implements the same
interface for the functions of a config file.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm.config import Config
from lm.options import replaced
from lm.record import FileRecord

VIRTUAL_RANKS = 8  # the default


class Audit:
    """Surrounds the calls of the functions of one network; here, without any checks."""

    why_irreproducible = ""  # why results of the training differ between runs, or ""

    def state_parts(self, found: Mapping[str, list[int]]) -> dict[str, tuple[list[int], str]]:
        """Return the shape and the type of each part of the result of `state_shapes`."""
        return {name: (shape, "float32") for name, shape in found.items()}

    def build(self, build: Callable[[], tuple], name: str, *call: Any) -> tuple:
        """Call `build`, and return its first result: the results of the network function `name`.

        `call` contains the shape of the first result, the inputs and the context of the call.
        """
        return build()[0]

    def start_update(self, global_step: Any, replaced: Mapping[str, Sequence[str]]) -> Any:
        """Return a `UserUpdate` if the update, which is built next, calls the config file.

        `replaced` contains the settings that each function replaces.
        """
        return None


@dataclasses.dataclass(frozen=True)
class NetworkFunctions:
    """The functions that build a network; by default, the built-in network of `lm/model/lstm.py`.

    A run depends on its config file if the file defines a network or a subclass of Config.
    """

    where: str = "the built-in network"  # path of the config file, for messages
    # the functions of the config file by name; empty for the built-in network
    by_name: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    sha256: str | None = None  # checksum of the config file if runs depend on the file
    config_class: type[Config] = Config
    # SHA-256 of the files that the config file loads or imports, by name
    loaded: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_built_in(self) -> bool:
        """Whether no config file defines the network."""
        return not self.by_name

    @property
    def has_losses(self) -> bool:
        """Whether the file computes the losses. In training, they may be sampled or smoothed."""
        return "build_losses" in self.by_name

    @property
    def file_record(self) -> FileRecord | None:
        """The record of the config file if runs depend on the file."""
        if self.sha256 is None:
            return None
        return FileRecord(os.path.abspath(self.where), self.sha256, dict(self.loaded))

    def resolve(self, config: Config) -> Config:
        """Return the config with its default for `virtual_ranks`, after a check of the config."""
        return replaced(config, virtual_ranks=config.virtual_ranks or VIRTUAL_RANKS)

    def call(self, function: Callable, *arguments: Any) -> Any:
        """Call a function of the network."""
        return function(*arguments)

    def checkpoint_name(self, weight: str) -> str:
        """Return the name of a weight in checkpoints of a TF 1.x program."""
        return weight

    def audit(self, network: Any) -> Audit:
        """Return the audit of a new `Network`."""
        return Audit()

    def one_line_errors(self, running: bool = False) -> contextlib.AbstractContextManager:
        """Return a context in which errors of the user's code become one line.

        `running` states whether the graph is running or being built.
        """
        return contextlib.nullcontext()

    def check(
        self, config: Config, vocab_size: int, session_config: Any, words: Sequence[str]
    ) -> None:
        """Check the network by experiment before a run starts."""


BUILT_IN = NetworkFunctions()
