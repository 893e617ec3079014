# SPDX-License-Identifier: Apache-2.0
"""The Python of README.md and python/README.md, which are programs, and of docs/clients.md:
only the endpoint is the test's, and KVD_SOCKET names the decode side's daemon."""
import os
import re
import shutil
import subprocess
import sys

import pytest

import kvd
from conftest import ROOT


def python_of(path):
    with open(os.path.join(ROOT, path)) as text:
        return re.search(r"^```python\n(.*?)^```$", text.read(), re.M | re.S).group(1)


def test_clients_example_pulls_the_offer(pair, monkeypatch):
    text = python_of("docs/clients.md")
    assert text.count("\n") == 5 and text.count("tcp://127.0.0.1:7400") == 1
    shape = re.search(r"sglang_mha\((.*?)\)\n", text).group(1)
    layout = eval("kvd.Layout.sglang_mha(%s)" % shape)
    with kvd.Client(pair[0].socket_path) as client:
        pool = client.pool(layout, [client.register(kvd.Memory(n)) for n in layout.buffers])
        offer = client.offer(42, pool, {"kv": [0, 1, 2]})
        monkeypatch.setenv("KVD_SOCKET", pair[1].socket_path)
        told = {}
        exec(text.replace("tcp://127.0.0.1:7400", client.endpoint), told)
        try:
            assert offer.wait(timeout=60) == kvd.SUCCESS
            assert told["client"].endpoint != client.endpoint
        finally:
            told["client"].close()


@pytest.mark.parametrize("path", ["README.md", "python/README.md"])
def test_first_transfer_is_a_complete_program(tmp_path, path):
    (tmp_path / "first.py").write_text(python_of(path))
    env = dict(os.environ, KVD_AUTOSTART="1", KVD_RUN_DIR=str(tmp_path),
               KVD_DAEMON=os.path.join(os.environ["KVD_BUILD"], "kvd"))
    done = subprocess.run([sys.executable, "first.py"], cwd=tmp_path, env=env, text=True,
                          capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout == "%s\n" % ([8 * 16 * 256] * 4)


def test_source_tree_names_build_command(tmp_path):
    """An example by the tree's package, which has no extension module."""
    shutil.copytree(os.path.join(ROOT, "python", "kvd"), tmp_path / "kvd",
                    ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    env = dict(os.environ, PYTHONPATH=str(tmp_path), PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run([sys.executable, os.path.join(ROOT, "examples", "push.py"), "a", "b"],
                          env=env, text=True, capture_output=True, timeout=60)
    assert done.returncode == 1 and "circular" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith("ImportError: kvd: no extension module")
    assert "pip install ./python" in done.stderr and str(tmp_path) in done.stderr, done.stderr
