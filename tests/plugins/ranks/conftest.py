"""Processes of one group on this machine: a command of ``oarlock`` on each rank, over the ring of MLX's own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

PROGRAM = "from oarlock.plugins.cli import main; main()"


class Group:
    """So many processes of one command; a context manager that leaves none behind."""

    def __init__(self, size, folder, arguments):
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
        hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]
        for each in sockets:
            each.close()
        file = folder / "hosts.json"
        file.write_text(json.dumps(hosts))
        self.processes = []
        for rank in range(size):
            environment = {**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(file), "PYTHONPATH": ""}
            command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            self.processes.append(subprocess.Popen(command, cwd=folder, env=environment, **pipes))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()

    def end(self, timeout=120):
        """Wait for all and return (exit code, stdout, stderr) of each rank."""
        ended = []
        for process in self.processes:
            out, err = process.communicate(timeout=timeout)
            ended.append((process.returncode, out, err))
        return ended


@pytest.fixture
def ranks(tmp_path):
    """Start a group: ``with ranks(2, "generate", ...) as group``."""
    return lambda size, *arguments: Group(size, tmp_path, arguments)


@pytest.fixture(scope="session")
def even(saved, tmp_path_factory):
    """The directory of a tiny llama with four heads and two KV heads."""
    return saved(tmp_path_factory.mktemp("even"))
