"""`python -m skyproxy_operator`: runs the operator."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import Sequence
from typing import Any

from skyproxy.errors import ClusterError, ConfigurationError
from skyproxy_operator.options import Options


def parser() -> argparse.ArgumentParser:
    """The operator's arguments; what belongs to an installation is in its environment instead."""
    result = argparse.ArgumentParser(
        prog="skyproxy_operator",
        description="Run the skyproxy operator: it creates workers for Computes, and removes them when they are done.",
        epilog="SKYPROXY_OPERATOR_* variables set the worker images, the lease and intervals; see the documentation.",
        allow_abbrev=False,
    )
    where = result.add_mutually_exclusive_group(required=True)
    where.add_argument("-A", "--all-namespaces", action="store_true", help="watch the whole cluster")
    where.add_argument("-n", "--namespace", action="append", default=[], help="watch this namespace; repeatable")
    result.add_argument("--log-format", default="full", choices=("full", "plain", "json"), help="log format")
    result.add_argument("--log-level", default="info", choices=("debug", "info", "warning"), help="log level")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the operator until it is told to end.

    Args:
        argv: the arguments, by default those of the process.

    Returns:
        The exit status: 0 after an orderly end, 2 where the configuration cannot work.
    """
    arguments = parser().parse_args(argv)
    # Late: kopf takes a while, and a wrong argument should not wait for it.
    import kopf

    from skyproxy_operator import handlers
    from skyproxy_operator.options import load

    try:
        options = load()
    except ConfigurationError as exc:
        print(f"skyproxy_operator: {exc}", file=sys.stderr)
        return 2
    kopf.configure(
        debug=arguments.log_level == "debug",
        quiet=arguments.log_level == "warning",
        log_format=kopf.LogFormat[arguments.log_format.upper()],
    )
    try:
        asyncio.run(_check_cluster(options))
    except (ClusterError, ConfigurationError) as exc:
        # Before kopf begins: it would try again and again, and no cluster gets newer by that.
        print(f"skyproxy_operator: {exc}", file=sys.stderr)
        return 2
    asyncio.run(
        kopf.operator(
            registry=handlers.REGISTRY,
            clusterwide=arguments.all_namespaces,
            namespaces=arguments.namespace,
            standalone=True,
            memo=kopf.Memo(namespaces=tuple(arguments.namespace)),
            # Else kopf asks for the user's name, and the image need not know the user that it runs as.
            identity=kopf_identity(),
        )
    )
    return 0


async def _check_cluster(options: Options) -> None:
    """Find out whether there is a cluster that we can work on; one that does not answer yet is waited for later.

    Raises:
        ConfigurationError: the credentials cannot be used.
        ClusterError: it is too old.
    """
    from kubernetes_asyncio.config import ConfigException

    from skyproxy_operator.cluster import ClusterConnection

    try:
        cluster = await ClusterConnection.connect(options.request_timeout_seconds)
    except (ConfigException, OSError) as exc:
        raise ConfigurationError(f"the credentials for the cluster cannot be used: {exc}") from exc
    try:
        await cluster.check_version()
    finally:
        await cluster.close()


def kopf_identity() -> Any:
    """Return kopf's name for this process; it has no effect, because our own Lease says who leads."""
    return f"skyproxy-operator@{socket.gethostname()}"


if __name__ == "__main__":
    sys.exit(main())
