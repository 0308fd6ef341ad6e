"""Jobs: scripts and functions that outlive the program which sent them. Torch is loaded where a function needs it.

Here is what a program and the command line do with jobs, and the beginning of a job's own process on the worker; the
worker's side, which starts and watches that process, is `skyproxy_server.jobs`.
"""
