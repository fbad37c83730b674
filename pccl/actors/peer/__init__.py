"""The peer actor's process: control link, lane pool, state transfers, probes."""
