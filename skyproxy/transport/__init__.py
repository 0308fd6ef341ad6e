"""Moves messages between client and worker: framing, sockets, TLS. Knows nothing of tensors or operations."""
