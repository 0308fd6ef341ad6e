"""The client's side of Kubernetes: asking the API server, describing a worker to it, and reaching one.

The only part that uses kubernetes_asyncio, and only when a cluster is really asked.
"""
