"""Fuzzing a live run: frames that are wrong in every way we can think of, sent to a real master with real members.

`drawing` makes messages and spoils them, `sessions` says who sends what when, `assault` carries it out over many
connections, and `trial` judges: nobody healthy is disturbed, and nothing is left over in the master. Everything that
is drawn comes from one seed; what is not repeatable is the order in which a kernel delivers it.
"""
