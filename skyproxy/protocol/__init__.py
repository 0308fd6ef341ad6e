"""Everything that client and worker may say to each other. No I/O, no torch."""
