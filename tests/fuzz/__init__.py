"""Fuzz a live run: send frames that are wrong in many ways to a real master with real members.

`random_messages` makes messages and corrupts them, `sessions` defines what each connection sends, `assault` runs many
sessions at the same time, and `trial` checks the result: healthy members keep working, and the master leaks nothing.
All random values come from one seed; only the order in which the kernel delivers the frames is not repeatable.
"""
