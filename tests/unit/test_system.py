"""The memory of a process."""

from lm.system import cpu_identity
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


def test_arm_cpus_are_distinguished(tmp_path):
    common = "processor : 0\nFeatures : fp asimd sve\nCPU implementer : 0x41\nCPU variant : 0x1\n"
    found = set()
    for part in ("0xd40", "0xd4f", "0xd40"):  # Neoverse V1 and V2
        (tmp_path / "cpuinfo").write_text(f"{common}CPU part : {part}\nCPU revision : 1\n\n")
        found.add(cpu_identity(str(tmp_path / "cpuinfo")))
    assert len(found) == 2
