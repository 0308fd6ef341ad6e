"""Sizes, strides and dtypes of results, computed from sizes, strides and dtypes.

Pure functions: no tensors, no devices, no sessions.
"""
