"""The flags that the benchmarks share."""

from __future__ import annotations

import dataclasses
import os
from typing import Optional

from lm.cli.flags import Flags
from lm.config import Config, load_config
from lm.distributed.cores import count_cores
from lm.errors import UserError


def define_common(flags: Flags, repeats: int) -> None:
    """Define --out, --repeats and --intra_op_threads."""
    flags.define(str, "out", "benchmarks", "directory of the JSON file and the plots")
    flags.define(int, "repeats", repeats, f"measurements of each kind (default: {repeats})")
    flags.define(
        int, "intra_op_threads", None, "threads of each rank (default: cores / ranks of a host)"
    )


def define_training(flags: Flags) -> None:
    """Define --config, the Config's fields, and how many steps a measurement has."""
    flags.define(
        str, "config", "config_small", "a config in configs/, or a .py file (default: config_small)"
    )
    flags.define_fields(Config, show_defaults=False)
    flags.define(
        str, "data_path", None, "directory of a corpus (default: 10,000 random words, Zipf's law)"
    )
    flags.define(
        int, "steps_per_repeat", None, "steps of a measurement (default: as many as fit into 2 s)"
    )
    flags.define(
        int, "untimed_steps", 2, "steps before each measurement that are not timed (default: 2)"
    )


def define_ranks(flags: Flags) -> None:
    """Define --ranks, a list, and --hosts."""
    flags.define(str, "ranks", "1,2", "numbers of ranks (default: 1,2)")
    flags.define(str, "hosts", None, "as mpirun's -H: host1:1,host2:1 (default: this host)")


def config_of(flags: Flags) -> Config:
    """Return the config that the flags name, with the given fields put over it.

    Raises:
      UserError: It is no config, or --data_path is no directory.
    """
    if flags["data_path"] and not os.path.isdir(flags["data_path"]):
        raise UserError(f"data_path {flags['data_path']} is not a directory")
    return dataclasses.replace(load_config(flags["config"]), **flags.given(Config))


def positive(flags: Flags, *names: str) -> None:
    """Check flags whose values must be at least 1 where they are given.

    Raises:
      UserError: Names the flag.
    """
    for name in names:
        if flags[name] is not None and flags[name] < 1:
            raise UserError(f"{name} must be at least 1, not {flags[name]}")


def parse_ranks(text: str) -> list[int]:
    """Turn "1,2,4" into numbers of ranks, ascending, each once.

    Raises:
      UserError: It is something else.
    """
    try:
        ranks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ranks = []
    if not ranks or ranks[0] < 1:
        raise UserError(f"ranks must be numbers of at least 1 like 1,2,4, not {text!r}")
    return ranks


def ranks_per_host(ranks: int, hosts: Optional[str]) -> int:
    """Return the most ranks that a host gets, from mpirun's -H ("host1:2,host2:2") or None."""
    if not hosts:
        return ranks
    slots = [host.rpartition(":") for host in hosts.split(",")]
    try:
        return min(ranks, max(int(count) if name else 1 for name, _, count in slots))
    except ValueError:
        raise UserError(f"hosts must be like host1:1,host2:1, not {hosts!r}") from None


def choose_threads(flags: Flags, local_ranks: int) -> int:
    """Return the threads of each rank: the user's choice, or this host's cores shared out."""
    return flags["intra_op_threads"] or max(count_cores() // local_ranks, 1)


def steps_in(seconds: float, step_seconds: float) -> int:
    """Return how many steps fit into some seconds, at least 3."""
    return max(3, round(seconds / step_seconds))
