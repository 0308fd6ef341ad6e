"""The work of a program and its workers, measured on both sides and brought onto one clock. Only observes."""
