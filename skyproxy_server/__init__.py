"""The program in the worker: it listens, keeps sessions, and executes what clients record. Imports no client code."""
