"""Tests with real processes on loopback; `helpers` starts and ends them."""
