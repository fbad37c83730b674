"""Print `docs/protocol.md` from the tables in the code.

    python docs/make_protocol.py > docs/protocol.md

A test compares the page with what this prints.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pccl._core.master import master_state
from pccl._core.peer import peer_state
from pccl._core.protocol import hellos  # noqa: F401 declares messages, as the machines below import the others
from pccl._core.protocol.codec import BY_OPCODE, PROTOCOL_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

HEAD = f"""# The protocol, version {PROTOCOL_VERSION}

Printed from the tables in the code by `docs/make_protocol.py`.

A frame is a header of 12 bytes (magic `PC`, version, opcode, length of the body, CRC-32 over header and body; little
endian) and a body. Each connection accepts only the opcodes that are legal on it at that moment, and no body longer
than the largest body of that message; both are checked before the connection waits for the body.

## Messages

| opcode | message | direction | fields | largest body in bytes |
|---|---|---|---|---|
"""

MASTER = """
## Messages that the master accepts

A dot marks the phases of the sending peer in which the master accepts its message. The master answers any other message
with the reason and closes the connection.

"""

PEER = """
## Events that a peer accepts

A dot marks the phases in which a peer accepts an event. A call of the training process that is not listed is answered
with the reason why there is no membership; a message of the master that is not listed ends the membership.

"""


def render() -> str:
    """Return the whole page."""
    rows = []
    for opcode, form in sorted(BY_OPCODE.items()):
        fields = ", ".join(f"`{name}` {kind}" for name, kind in zip(form.names, form.types, strict=True))
        rows.append(f"| `{opcode:#04x}` | {form.cls.__name__} | {form.direction} | {fields} | {form.limit} |\n")
    known = {form.cls for form in BY_OPCODE.values()}
    messages = {pair: row for pair, row in master_state.TRANSITIONS.items() if pair[1] in known}
    parts = [HEAD, *rows, MASTER, _matrix(messages), PEER, _matrix(peer_state.TRANSITIONS)]
    return "".join(parts)


def _matrix(transitions: Mapping[tuple[str, type], object]) -> str:
    """Return a table with a row for each event and a dot in the phases that accept it."""
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
