"""Snapshots as files: their documents, the packs with their bytes, and the places where both lie.

A worker writes and reads them on its volume, a client where it saves a session. Nothing in a snapshot is code, and
nothing in it is believed: see `documents`. The format is described in docs/reference/snapshot-format.md.
"""
