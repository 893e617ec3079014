# SPDX-License-Identifier: Apache-2.0
"""The Python of README.md, run as it stands there: only the endpoint is the test's, and
KVD_SOCKET names the decode side's daemon."""
import os
import re

import kvd
from conftest import ROOT


def readme_lines():
    with open(os.path.join(ROOT, "README.md")) as text:
        return re.search(r"^```python\n(.*?)^```$", text.read(), re.M | re.S).group(1)


def test_readme_takes_what_was_offered(pair, monkeypatch):
    text = readme_lines()
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
