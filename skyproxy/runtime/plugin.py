"""The hooks that a plugin of a pool can have, and the places where they run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from skyproxy.errors import PluginError, text_of

if TYPE_CHECKING:
    from skyproxy.runtime.instance import InstanceInfo


class Plugin:
    """A base for plugins: every hook does nothing.

    A plugin need not derive from it: what has one of the hooks is a plugin. Plugins travel to every worker by pickle,
    so their attributes must be picklable, and they import frameworks only in the hooks that run there.

    Attributes:
        restarts_ranks: whether its framework can be set up only once in the life of a process, so that the ranks'
            processes are started anew where the group has to be formed again.

    Example:
        ```python
        class Threads(skyproxy.plugins.Plugin):
            @contextlib.contextmanager
            def around_process(self, info):
                os.environ["OMP_NUM_THREADS"] = "1"
                yield


        with skyproxy.Compute(provider=skyproxy.Local(), plugins=[Threads()]) as pool:
            print(pool.run(os.getenv, "OMP_NUM_THREADS"))
        ```
    """

    restarts_ranks: bool = False

    @property
    def name(self) -> str:
        """For people: what errors call it."""
        return type(self).__name__

    def transform(self, image: Any, cluster: Any) -> Any:
        """On the client, before workers are launched: the image with what this plugin needs.

        Args:
            image: an `Image`; make a copy with `dataclasses.replace`, never change it.
            cluster: what is to be launched; `cluster.spec` is the `WorkerSpec`.

        Example:
            ```python
            class Einops(skyproxy.plugins.Plugin):
                def transform(self, image, cluster):
                    return image.replace(pip=[*image.pip, "einops"])
            ```
        """
        return image

    def around_process(self, info: InstanceInfo) -> contextlib.AbstractContextManager[object]:
        """In every rank's process, once, before any function is unpickled there: the place for environment variables.

        All plugins' `around_process` are entered before the first `around_app`. Left when the pool ends.

        Example:
            ```python
            class Threads(skyproxy.plugins.Plugin):
                @contextlib.contextmanager
                def around_process(self, info):
                    os.environ["OMP_NUM_THREADS"] = "1"
                    yield
            ```
        """
        return contextlib.nullcontext()

    def around_app(self, info: InstanceInfo) -> contextlib.AbstractContextManager[object]:
        """In every rank's process, once, before the first task: the place for process groups.

        All ranks enter it at the same time, so they may wait for one another. Left when the pool ends, or the worker.

        Example:
            ```python
            class Seeds(skyproxy.plugins.Plugin):
                @contextlib.contextmanager
                def around_app(self, info):
                    torch.manual_seed(info.rank)
                    yield
            ```
        """
        return contextlib.nullcontext()

    def decorate(self, function: Callable[..., object]) -> Callable[..., object]:
        """On the worker, for every task: the function to call in its place.

        Example:
            ```python
            class Timed(skyproxy.plugins.Plugin):
                def decorate(self, function):
                    def timed(*args, **kwargs):
                        begin = time.perf_counter()
                        try:
                            return function(*args, **kwargs)
                        finally:
                            print(time.perf_counter() - begin, "s")

                    return timed
            ```
        """
        return function

    def around_client(self, pool: Any) -> contextlib.AbstractContextManager[Any]:
        """On the client, around the body of the pool's `with` block.

        Example:
            ```python
            class Announced(skyproxy.plugins.Plugin):
                @contextlib.contextmanager
                def around_client(self, pool):
                    print("the pool has", pool.world_size, "processes")
                    yield
            ```
        """
        return contextlib.nullcontext()

    def abort(self, info: InstanceInfo) -> None:
        """In a rank's process, on a thread of its own, when another rank failed: ends what tasks wait for in vain.

        Example:
            ```python
            stopped = threading.Event()


            class Queue(skyproxy.plugins.Plugin):
                def abort(self, info):
                    stopped.set()  # the tasks of this process that wait for others look at it
            ```
        """


HOOKS = ("transform", "around_process", "around_app", "decorate", "around_client", "abort")
"""All that a plugin can do. It need not derive from `Plugin` to have some of them."""


def name_of(plugin: object) -> str:
    """Return the name by which errors call a plugin."""
    return str(getattr(plugin, "name", None) or type(plugin).__name__)


@contextlib.contextmanager
def reporting(plugin: object, hook: str, where: str = "") -> Iterator[None]:
    """Whatever fails inside the `with` block is a `PluginError` that names the plugin and the hook.

    Args:
        plugin: whose hook is called.
        hook: its name.
        where: more about the place, such as ", rank 1 of 2".
    """
    try:
        yield
    except PluginError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {text_of(error)}"
        raise PluginError(f"plugin {name_of(plugin)!r}, {hook}{where}: {text}") from error


def has_hook(plugin: object, hook: str) -> bool:
    """Return whether a plugin does something in a hook; the base class's own hooks do nothing."""
    found = getattr(type(plugin), hook, None)
    return callable(getattr(plugin, hook, None)) and found is not getattr(Plugin, hook)
