"""Prints `docs/protocol.md` from the tables in the code.

    python docs/make_protocol.py > docs/protocol.md

A test compares the page with what this prints.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pccl._core.master import master_state
from pccl._core.peer import peer_state
from pccl._core.protocol.codec import BY_OPCODE, WIRE_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

HEAD = f"""# The protocol, version {WIRE_VERSION}

Printed from the tables in the code by `docs/make_protocol.py`.

A frame is a header of 12 bytes (magic `PC`, version, opcode, length of the body, CRC-32 over header and body; little
endian) and a body. Each connection accepts only the opcodes that are legal on it at that moment, and no body longer
than that message can be; both are checked before the body is awaited.

## Messages

| opcode | message | from whom to whom | fields | largest body |
|---|---|---|---|---|
"""

MASTER = """
## What the master understands

By the phase of the peer that sends it. The master answers any other message with the reason and closes the connection.

"""

PEER = """
## What a peer understands

By its own phase. A call of the training process that is not listed is answered with the reason why there is no
membership; a message of the master that is not listed ends the membership.

"""


def render() -> str:
    """The whole page."""
    rows = []
    for opcode, layout in sorted(BY_OPCODE.items()):
        fields = ", ".join(f"`{name}` {kind}" for name, kind in zip(layout.names, layout.types, strict=True))
        rows.append(f"| `{opcode:#04x}` | {layout.cls.__name__} | {layout.direction} | {fields} | {layout.limit} |\n")
    parts = [HEAD, *rows, MASTER, _matrix(master_state.TRANSITIONS), PEER, _matrix(peer_state.TRANSITIONS)]
    return "".join(parts)


def _matrix(transitions: Mapping[tuple[str, type], object]) -> str:
    """A table with a row for each event and a mark in the phases that know it."""
    phases = list(dict.fromkeys(phase for phase, _ in transitions))
    events = list(dict.fromkeys(event.__name__ for _, event in transitions))
    known = {(phase, event.__name__) for phase, event in transitions}
    lines = [f"| | {' | '.join(phases)} |\n", f"|---|{'---|' * len(phases)}\n"]
    lines += [
        f"| {event} | {' | '.join('●' if (phase, event) in known else '' for phase in phases)} |\n" for event in events
    ]
    return "".join(lines)


if __name__ == "__main__":
    sys.stdout.write(render())
