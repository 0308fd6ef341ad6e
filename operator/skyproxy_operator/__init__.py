"""The Kubernetes operator: turns a worker's custom resource into a pod with a GPU, and reaps it when it is done.

What belongs here are thin kopf handlers that call pure code: parse the spec, build the pod, compute the status, decide
what to reap. Names and errors are shared with the client; the worker's program and torch are never imported. The parent
directory has no `__init__.py`: a package named `operator` would shadow the standard library's.
"""
