"""`python -m skyproxy`: the `skyproxy` command of this interpreter, whether or not its folder is on the path."""

from __future__ import annotations

from skyproxy.cli.main import main

if __name__ == "__main__":
    main()
