"""What a program and its workers did, measured on both sides and brought onto one clock. Only observes."""
