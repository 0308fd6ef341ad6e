"""Modules that Python imports first in the processes of a script that is debugged: this folder is on their path."""
