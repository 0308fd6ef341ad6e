"""Pools: workers that are provisioned together, and functions that run on them."""
