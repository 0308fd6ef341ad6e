"""Every public name and method shows in its docstring how it is used, and what is shown runs."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyproxy

MODULES = ("skyproxy", "skyproxy.plugins", "skyproxy.providers", "skyproxy.runtime", "skyproxy.integrations")
NAMES = [name for name in skyproxy.__all__ if not inspect.ismodule(getattr(skyproxy, name)) and name != "__version__"]
ELSEWHERE = {"AWS", "Container", "Kubernetes", "Remote", "connect", "connect_async"}
"""What these show needs another machine, or an engine."""
PARTS = {
    *("Job", "JobStatus", "checkpoint_dir", "PendingCompute", "Profile", "RemoteStateDict", "gather"),
    *("load_ipython_extension", "unload_ipython_extension"),
}
"""What these show needs a model, a pool or a notebook that the reader has."""
MORE_ELSEWHERE = {
    *("NodeModels.from_pretrained", "NodeModels.from_config", "NodeModels.generate"),
    *("NodeNames.put", "NodeNames.get", "NodeNames.named", "NodeNames.forget", "NodeMoves.move_to"),
    *("plugins.joblib", "JoblibPlugin.register", "plugins.sklearn", "plugins.torch", "PoolCalls.torchrun"),
    *("NodeJobs.submit_job", "NodeJobs.job", "NodeJobs.jobs", "PoolJobs.submit_job", "PoolJobs.job"),
    *("Job.status", "Job.wait", "Job.logs", "Job.log_lines", "Job.result", "Job.cancel", "Job.remove"),
}
"""What these show needs a model, a script, another worker, or packages to be installed."""
NOT_FOR_USERS = {
    "pools call them": {
        *(
            "AWS.launch",
            "AWS.reach",
            "Container.launch",
            "Kubernetes.launch",
            "Local.launch",
            "Remote.launch",
            "Remote.single_nodes",
            "Container.single_nodes",
        ),
        *("Provider.launch", "Launched.close", "Launched.logs", "Launched.restart"),
    },
    "providers call them": {
        *("Container.on_network", "Container.make_network", "Container.remove_network"),
        "Image.content_hash",
        "Image.included_paths",
        "Image.index_of",
    },
    "operators call them": {"PoolCalls.submit_call", "PoolCalls.broadcast_call", "PoolCalls.stream_call"},
    "this package calls them": {
        *(
            "Compute.provision",
            "Compute.enter_client_hooks",
            "PoolActors.add_actor",
            "PoolCalls.run_torchrun",
            "PoolCalls.script_endpoints",
            "Compute.want_nodes",
            "Compute.abandon_in_child",
        ),
        *("InstanceInfo.to_json", "InstanceInfo.from_mapping", "NodeFunctions.submit_payload"),
    },
    "PyTorch documents them": {
        f"RemoteTensor.{name}"
        for name in (
            *("untyped_storage", "data_ptr", "set_", "is_set_to", "is_shared", "share_memory_", "is_pinned"),
            *("pin_memory", "tolist", "numpy", "as_subclass", "new_tensor", "new"),
        )
    },
}
EXCEPTIONS = {name for names in NOT_FOR_USERS.values() for name in names}


def public_names() -> Iterator[tuple[str, object]]:
    """The public names, with their modules for those that are not of the package itself."""
    seen = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            value = getattr(module, name)
            if name != "__version__" and not inspect.ismodule(value) and id(value) not in seen:
                seen.add(id(value))
                yield f"{module_name}.{name}".removeprefix("skyproxy."), value


def public_methods() -> Iterator[tuple[str, object]]:
    """The methods of public classes, by the class of ours that defines them; an override goes without its base's."""
    for _, value in public_names():
        bases = [
            base for base in getattr(value, "__mro__", ()) if base.__module__.startswith(("skyproxy", "torch.sky"))
        ]
        for index, base in enumerate(bases):
            for name, member in vars(base).items():
                function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
                overrides = any(example(vars(above).get(name)) for above in bases[index + 1 :])
                if inspect.isfunction(function) and not name.startswith("_") and not overrides:
                    yield f"{base.__name__}.{name}", function


def example(value: object) -> str:
    """The code of an object's example, or of the block after `::`; empty where there is none."""
    text = inspect.getdoc(value) or ""
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL) or re.search(r"::\n\n((?: {4}.*\n?)+)", text)
    return textwrap.dedent(found[1]) if found else ""


METHODS = dict(public_methods())
EVERYTHING = dict(public_names()) | {name: value for name, value in METHODS.items() if name not in EXCEPTIONS}


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_public_name_shows_how_it_is_used(name: str) -> None:
    code = example(EVERYTHING[name])
    assert code.strip()
    compile(code, name, "exec")


def test_every_exception_is_a_public_method_without_an_example() -> None:
    assert {name for name in EXCEPTIONS if name not in METHODS or example(METHODS[name])} == set()


def test_every_example_that_is_not_run_is_one() -> None:
    assert set(NAMES) >= ELSEWHERE | PARTS
    assert set(EVERYTHING) - set(NAMES) >= MORE_ELSEWHERE


PREAMBLE = (
    "import asyncio, contextlib, os, sys, threading, time, torch, skyproxy\nfrom collections.abc import Iterator\n"
)
GIVEN = """
@skyproxy.function
def square(x):
    return x * x


class Adder(skyproxy.Actor):
    def add(self, one: int, two: int) -> int:
        return one + two


"""
"""What the examples of methods take from those of their classes, beside `node` and `pool`."""


def run(runner: str, folder: Path) -> None:
    """Run the files of a folder, each as a program of its own in one process."""
    done = subprocess.run(
        [sys.executable, "-c", runner, str(folder)], cwd=folder, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_examples_run(tmp_path: Path) -> None:
    for name in NAMES:
        if name not in ELSEWHERE | PARTS:
            # Functions of a pool travel as code, so each example is a file of its own, as a reader's would be.
            code = [PREAMBLE, "train_one_epoch = lambda: None", example(getattr(skyproxy, name))]
            (tmp_path / f"example_{name}.py").write_text("\n".join(code), encoding="utf-8")
    # Some close the node that has sky:0, after which a program has to say what it wants next.
    runner = (
        "import pathlib, runpy, sys, skyproxy\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).glob('*.py')):\n"
        "    runpy.run_path(str(path), run_name='__main__')\n"
        "    skyproxy.reset()\n"
    )
    run(runner, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_examples_of_methods_and_of_submodules_run(tmp_path: Path) -> None:
    for name, value in EVERYTHING.items():
        if name not in MORE_ELSEWHERE | set(NAMES):
            (tmp_path / f"example_{name.replace('.', '_')}.py").write_text(PREAMBLE + GIVEN + example(value), "utf-8")
    runner = (
        "import pathlib, runpy, sys, skyproxy\n"
        "coordination = skyproxy.plugins.coordination()\n"
        "with skyproxy.launch_local('cpu') as node:\n"
        "    with skyproxy.Compute(provider=skyproxy.Local(), nodes=2, plugins=[coordination]) as pool:\n"
        "        for path in sorted(pathlib.Path(sys.argv[1]).glob('*.py')):\n"
        "            print(path.name, file=sys.stderr)\n"
        "            runpy.run_path(str(path), {'node': node, 'pool': pool}, run_name='__main__')\n"
    )
    run(runner, tmp_path)
