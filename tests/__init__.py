"""Tests by tier: unit, sim and process; how each tier is meant is in CONTRIBUTING.md."""

from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the source tree
