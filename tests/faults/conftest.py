"""Fixtures for the fault tests."""

from tests.faults.jobs import start

__all__ = ["start"]
