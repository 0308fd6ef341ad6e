"""The command line: thin commands, which parse, call, and print."""
