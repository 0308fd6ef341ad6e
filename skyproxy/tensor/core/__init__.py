"""A remote tensor, its device, its memory and its values on the move.

Everything in `skyproxy.tensor` stands on this; no op is known here.
"""
