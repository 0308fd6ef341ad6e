#!/usr/bin/env python3
"""Stands in for docker: the same commands and answers, with processes of this machine as containers.

What is started is the command that the container would run; paths in it lead into the container's own folder.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import time

STATE = pathlib.Path(os.environ["FAKE_ENGINE_STATE"])


def main(verb: str, *rest: str) -> None:
    with (STATE / "calls").open("a") as calls:
        calls.write(json.dumps([verb, *rest]) + "\n")
    if os.environ.get("FAKE_ENGINE_DOWN"):
        sys.exit("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.")
    globals()[verb](*rest)


def create(*rest: str) -> None:
    options, arguments = {"--env": [], "--label": [], "--volume": []}, list(rest)
    while arguments[0].startswith("--"):
        option, given, value = arguments.pop(0).partition("=")
        if not given:
            value = "" if option in ("--init", "--read-only") else arguments.pop(0)
        # A variable with its value is not one of ours.
        if not (option == "--env" and "=" in value):
            options.setdefault(option, []).append(value)
    image, *command = arguments
    if image == "no/such:image":
        sys.exit("Unable to find image 'no/such:image' locally\npull access denied")
    folder = STATE / options["--name"][0]
    (folder / "root").mkdir(parents=True)
    env = {name: os.environ[name] for name in options["--env"]}
    save(folder, {"options": options, "image": image, "command": command, "env": env, "pid": None})


def cp(source: str, target: str) -> None:
    if target == "-":
        name, _, path = source.partition(":")
        file = inside(STATE / name, path)
        if not file.exists():
            sys.exit(f"Error response from daemon: Could not find the file {path} in container {name}")
        with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
            archive.add(file, file.name)
        return
    name, _, path = target.partition(":")
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        archive.extractall(inside(STATE / name, path))


def start(name: str) -> None:
    folder = STATE / name
    row = load(folder)
    port = folder / "port"
    program, *arguments = row["command"]
    assert program == "python"
    arguments[arguments.index("--port") + 1] = "0"
    for option in ("--token-file", "--snapshots", "--suspend-report"):
        place = arguments.index(option) + 1
        arguments[place] = str(inside(folder, arguments[place]))
    command = [sys.executable, *arguments, "--port-file", str(port)]
    port.unlink(missing_ok=True)
    with (folder / "log").open("ab") as log:
        row["pid"] = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **row["env"]}
        ).pid
    row.pop("ended", None)
    save(folder, row)
    # The engine publishes a port at once; here it is known when the program has it.
    while not port.exists() and runs(row["pid"]):
        time.sleep(0.02)


def stop(*rest: str) -> None:
    option, seconds, name = rest
    assert option == "-t"
    row = load(STATE / name)
    os.kill(row["pid"], signal.SIGTERM)  # to the first process in it, as an init passes it on
    deadline = time.monotonic() + float(seconds)
    while runs(row["pid"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    save(STATE / name, {**row, "ended": 0})


def container(verb: str, name: str) -> None:
    assert verb == "inspect"
    folder = STATE / name
    if not folder.exists():
        sys.exit(f"Error response from daemon: No such container: {name}")
    row = load(folder)
    running = row["pid"] is not None and runs(row["pid"])
    port = (folder / "port").read_text().strip() if running and (folder / "port").exists() else None
    ports = {"8765/tcp": [{"HostIp": "127.0.0.1", "HostPort": port}] if port else None}
    state = {"Running": running, "ExitCode": 0 if running else row.get("ended", 1)}
    print(
        json.dumps([{"Created": "2026-01-01T00:00:00.123456789Z", "State": state, "NetworkSettings": {"Ports": ports}}])
    )


def ps(*rest: str) -> None:
    assert rest[-1] == "{{.Names}}", "docker prints labels, too, and podman does not"
    for folder in STATE.iterdir():
        if folder.is_dir():
            print(folder.name)


def logs(*rest: str) -> None:
    print((STATE / rest[-1] / "log").read_text(), end="")


def rm(*rest: str) -> None:
    name = rest[-1]
    pid = load(STATE / name)["pid"]
    if pid is not None and runs(pid):
        os.killpg(pid, signal.SIGKILL)
    (STATE / name).rename(STATE.parent / f"removed-{name}-{time.time_ns()}")


def inside(folder: pathlib.Path, path: str) -> pathlib.Path:
    result = folder / "root" / path.lstrip("/")
    (result if "." not in result.name and not result.suffix and path == "/tmp" else result.parent).mkdir(
        parents=True, exist_ok=True
    )
    return result


def runs(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def load(folder: pathlib.Path) -> dict:
    return json.loads((folder / "row.json").read_text())


def save(folder: pathlib.Path, row: dict) -> None:
    (folder / "row.json").write_text(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
