"""Payloads that the processes of a pool pass on to one another, so that their client sends them once.

What belongs here runs on workers, as functions that a client calls: without the right to call functions, nothing of it
can be reached. No torch.
"""
