"""Functions that clients run on this worker: their threads, their output, their results.

Apart from tensor operations, and switchable: who may run functions may run any code in this process.
"""
