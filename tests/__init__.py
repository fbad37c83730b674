"""Tests by tier: unit, sim and process; how each tier is meant is in CONTRIBUTING.md."""
