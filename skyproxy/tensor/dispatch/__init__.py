"""The street of an op, from PyTorch's call to the command in the session's stream.

What is known of an op before it is called, what its results look like, and how a call of it is recorded.
"""
