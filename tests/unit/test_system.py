"""The memory of a process."""

from tests.commands import run_code

# Prints the page faults of two buffers. The second buffer reuses the memory of the first.
FAULTS = """
import ctypes, resource
from lm.system import keep_freed_memory

def faults(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffer = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(buffer, 1, size)
    libc.free(ctypes.c_void_p(buffer))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

print(faults(2**27), faults(2**27))
"""


def test_freed_memory_is_kept_for_the_next_step():
    first, second = map(int, run_code(FAULTS).stdout.split())
    assert second < first / 10
