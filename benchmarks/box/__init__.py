"""A network in a box: hosts on one machine, joined by links with a rate, a delay, a queue and loss.

Every host is a network namespace with one device, and everything between two hosts goes through a small emulator. Both
ends are the kernel's own TCP, so its windows, slow start, congestion control and retransmissions are real.

    with Box(mesh(2, Link(rate_bits=1e9, delay_s=0.05))) as box:
        server = box.spawn(0, ["iperf3", "-s"])
        client = box.spawn(1, ["iperf3", "-c", box.address(0)])
        client.wait()
"""

from .network import DEVICE, Box, Counters, Link, LinkCounters, mesh, reason_against

__all__ = ["DEVICE", "Box", "Counters", "Link", "LinkCounters", "mesh", "reason_against"]
