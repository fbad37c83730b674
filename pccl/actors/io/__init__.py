"""What every actor does I/O with: loop, connections, listeners, diallers, processes, fault points, logs."""
