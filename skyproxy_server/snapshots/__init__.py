"""Snapshots of a session: what it consists of as plain data, that data's way back, and the folder where both lie.

Nothing in a snapshot is code, and nothing in it is believed: see `documents`. The format is described in
docs/reference/snapshot-format.md.
"""
