"""The `skyproxy` command: thin commands over providers, contexts and the cluster. Loads no torch."""
