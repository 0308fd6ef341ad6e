"""The `skyproxy` command: thin commands over providers, contexts and the cluster. Loads no torch."""

import sys

from skyproxy.errors import ConfigurationError

try:
    import skyproxy.settings  # noqa: F401
except ConfigurationError as error:
    # A variable of the environment that cannot be read, by whichever module is the first to need it.
    print(f"Error: {error}", file=sys.stderr)
    raise SystemExit(2) from None
