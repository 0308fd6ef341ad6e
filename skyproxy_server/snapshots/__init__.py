"""Snapshots of a session: what it consists of as plain data, that data's way back, and the requests about both.

What they look like as files is said in `skyproxy.snapshots`.
"""
