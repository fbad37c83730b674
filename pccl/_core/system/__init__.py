"""What is specific to Linux (futexes, memory mappings, process calls), under names that another system could have."""
