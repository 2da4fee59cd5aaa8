"""The compiled ops, which all tests of this directory need."""

import pytest

from lm import kernels
from lm.kernels import build


@pytest.fixture(scope="package", autouse=True)
def library():
    build.build()
    if not kernels.available():
        pytest.skip(kernels.description())
