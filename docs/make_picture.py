"""Draws `docs/ring.svg`, the picture in the README: a ring, a killed peer, the ring without it, and with a newcomer.

    python docs/make_picture.py > docs/ring.svg

A test compares the picture with what this prints.
"""

from __future__ import annotations

import math
import sys
from itertools import pairwise

WIDTH, HEIGHT, RADIUS, DOT = 200, 190, 56, 19
INK, CALM, DEAD, NEW = "#57606a", "#1f6feb", "#cf222e", "#1a7f37"

# Title, colours of the peers by name, the links, the broken links.
PICTURES = (
    ("all-reduce", {"A": CALM, "B": CALM, "C": CALM, "D": CALM}, "ABCDA", ""),
    ("kill -9", {"A": CALM, "B": CALM, "C": DEAD, "D": CALM}, "DAB", "BCD"),
    ("the others retry", {"A": CALM, "B": CALM, "D": CALM}, "ABDA", ""),
    ("a new peer joins", {"A": CALM, "B": CALM, "E": NEW, "D": CALM}, "ABEDA", ""),
)
POSITIONS = {"A": 0, "B": 1, "C": 2, "E": 2, "D": 3}


def position(name: str) -> tuple[float, float]:
    """The position of a peer on its ring, in pixels."""
    angle = math.tau * POSITIONS[name] / 4 - math.tau / 4
    return WIDTH / 2 + RADIUS * math.cos(angle), HEIGHT / 2 + 8 + RADIUS * math.sin(angle)


def link(source: str, target: str, *, broken: bool) -> str:
    """An arrow between two peers."""
    (x1, y1), (x2, y2) = position(source), position(target)
    length = math.hypot(x2 - x1, y2 - y1)
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    near, far = DOT + 3, DOT + 9
    ends = f'x1="{x1 + near * dx:.1f}" y1="{y1 + near * dy:.1f}" x2="{x2 - far * dx:.1f}" y2="{y2 - far * dy:.1f}"'
    look = f'stroke="{DEAD}" stroke-dasharray="3 4"' if broken else f'stroke="{INK}" marker-end="url(#tip)"'
    return f'<line {ends} {look} stroke-width="2"/>'


def peer(name: str, colour: str) -> str:
    """A dot with a letter."""
    x, y = position(name)
    dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{DOT}" fill="{colour}"/>'
    return f'{dot}<text x="{x:.1f}" y="{y + 5:.1f}" fill="#ffffff" font-weight="bold">{name}</text>'


def picture(index: int, title: str, peers: dict[str, str], links: str, broken: str) -> str:
    """One of the four pictures."""
    parts = [f'<text x="{WIDTH / 2:g}" y="18" fill="{INK}">{title}</text>']
    parts += [link(source, target, broken=False) for source, target in pairwise(links)]
    parts += [link(source, target, broken=True) for source, target in pairwise(broken)]
    parts += [peer(name, colour) for name, colour in peers.items()]
    return f'<g transform="translate({index * WIDTH} 0)">' + "".join(parts) + "</g>\n"


def render() -> str:
    """The whole picture."""
    size = f'width="{WIDTH * len(PICTURES)}" height="{HEIGHT}" viewBox="0 0 {WIDTH * len(PICTURES)} {HEIGHT}"'
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="4" markerHeight="4" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{INK}"/></marker>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14" '
    head += f'text-anchor="middle"><defs>{tip}</defs>\n'
    return head + "".join(picture(index, *what) for index, what in enumerate(PICTURES)) + "</svg>\n"


if __name__ == "__main__":
    sys.stdout.write(render())
