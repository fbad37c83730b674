"""All that is Linux: futexes, memory mappings, process calls, behind names another system could implement."""
