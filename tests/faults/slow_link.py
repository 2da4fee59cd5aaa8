"""A slow network between the two hosts of two_hosts.sh: python slow_link.py MBIT_PER_S MICROSECONDS

This program replaces their cable until it is killed. Each direction has a queue, as on a real line:
a packet leaves after the packets before it, and arrives after the latency in microseconds. If the
kernel has `tc netem`, it does the same.
"""

import collections
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
_MTU = 65520  # few large packets: this program must not be the bottleneck
_PR_SET_TIMERSLACK = 29


def open_device(host: int) -> int:
    """Move a host's address to a device whose packets this process carries; return the device."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name, namespace = f"lmslow{host}", f"lmhost{host}"
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    for command in (
        f"link set {name} netns {namespace}",
        f"-n {namespace} addr flush dev lmveth{host}",
        f"-n {namespace} addr add 10.77.0.{host}/24 dev {name}",
        f"-n {namespace} link set {name} mtu {_MTU} up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return file


def main(megabits: float, microseconds: float) -> None:
    """Carry packets forever."""
    # By default, sleeps end 50 us late. Spinning instead would use a core of the ranks.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    devices = [open_device(1), open_device(2)]
    seconds_per_byte, latency = 8e-6 / megabits, microseconds * 1e-6
    free_at, on_the_way = [0.0, 0.0], [collections.deque(), collections.deque()]
    print("carrying", flush=True)
    while True:
        due = min((queue[0][0] for queue in on_the_way if queue), default=None)
        wait = None if due is None else max(due - time.monotonic(), 0)
        for device in select.select(devices, [], [], wait)[0]:
            packet = os.read(device, _MTU)
            now, sender = time.monotonic(), devices.index(device)
            free_at[sender] = max(free_at[sender], now) + len(packet) * seconds_per_byte
            on_the_way[sender].append((free_at[sender] + latency, packet))
        for sender, queue in enumerate(on_the_way):
            while queue and queue[0][0] <= time.monotonic():
                os.write(devices[1 - sender], queue.popleft()[1])


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
