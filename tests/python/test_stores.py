# SPDX-License-Identifier: Apache-2.0
"""kvd.stores: a store's session, with a daemon and without."""
import os
import types

import numpy as np
import pytest

import kvd
from conftest import until
from kvd.stores import space_client
from kvd.stores import names
from kvd.stores.space_client import SpaceClient, hold_most
from kvd.vllm import identity
from kvd_daemon import Daemon
from test_vllm_plan import Clock, T, layout_text
from test_vllm_store import daemon  # noqa: F401


def test_daemon_without_chunks_is_logged_once(caplog):
    with Daemon() as daemon, kvd.Client(daemon.socket_path) as c:
        clock = Clock()
        spaces = SpaceClient(
            lambda: c,
            lambda c, key: c.space(layout_text(), model="m", scheme="s", tokens=T), clock=clock)
        for _ in range(3):
            assert spaces.ask(None, None) is None
            clock.now += space_client.MUTE_S + 1
        assert caplog.text.count("set chunk_memory") == 1


def test_silent_daemon_is_queried_with_growing_pauses(daemon):
    clock, space = Clock(), types.SimpleNamespace(find=lambda ids, timeout: None)
    with kvd.Client(daemon.socket_path) as c:
        spaces = SpaceClient(None, lambda c, key: space, c, clock=clock)

        def silent(space):
            clock.now += space_client.CALL_S
            raise kvd.TimeoutError("no answer", "ENOREPLY", 515)
        pauses = []
        for _ in range(6):
            assert spaces.ask("key", silent) is None
            pauses.append(spaces.until - clock.now)
            clock.now = spaces.until
        assert pauses == [5, 10, 20, 40, 60, 60]
        assert spaces.ask("key", lambda space: space) is space
        spaces.ask("key", silent)
        assert spaces.until - clock.now == 5


def test_absent_daemon_is_retried():
    clock, tried = Clock(), []

    def connect():
        tried.append(1)
        raise kvd.ConnectionError("nobody listens", "ENODAEMON", 1)
    spaces = SpaceClient(connect, None, clock=clock)
    for _ in range(3):
        assert spaces.ask(None, None) is None
    assert len(tried) == 1 and "nobody listens" not in (spaces.why or "")
    clock.now += space_client.AWAY_S
    assert spaces.ask(None, None) is None and len(tried) == 2
    assert "nobody listens" in spaces.why


def test_unused_spaces_are_closed():
    opened = []

    def opener(client, key):
        opened.append(key)
        return types.SimpleNamespace(find=lambda ids, timeout: None)
    client = types.SimpleNamespace(_kvd=types.SimpleNamespace(poll=lambda: None), lost=False)
    for most, wanted in ((0, "ab"), (1, "aba")):
        opened.clear()
        spaces = SpaceClient(None, opener, client, most=most)
        for key in "aabba":
            assert spaces.ask(key, lambda space: True)
        assert "".join(opened) == wanted and len(spaces.spaces) == (most or 2)


def test_longest_allowed_prefix_is_held():
    """Holds of a user keep half of its share at most."""
    ids = [i.to_bytes(32, "big") for i in range(1, 193)]
    with Daemon("[chunks]\nchunk_memory = 8 MiB\n") as daemon, \
            kvd.Client(daemon.socket_path) as c:
        layout, memory = kvd.Layout(), np.zeros(len(ids) << 15, np.uint8)
        layout.buffer(memory.nbytes)
        layout.view("kv", 16, len(ids)).heads("kv", 0, "k", buffer=0, unit_bytes=2048)
        pool = c.pool(layout, [c.register(memory)])
        spaces = SpaceClient(
            None, lambda c, key: c.space(pool, model="m", scheme="s", tokens=16), c)
        space = until(lambda: spaces.ask("key", lambda space: space))
        space.put(ids, {"kv": range(len(ids))}).wait()
        there = space.find(ids).chunks
        with pytest.raises(kvd.Error) as told:
            space.hold(ids[:there])
        assert told.value.code == "ELIMIT"
        held = hold_most(lambda count, remote: space.hold(ids[:count], remote=remote), there, None)
        assert 0 < held.chunks < there
        with pytest.raises(kvd.Error):  # it is the longest one
            space.hold(ids[:held.chunks + 1])


def test_evicted_chunks_are_not_logged(caplog):
    client = types.SimpleNamespace(_kvd=types.SimpleNamespace(poll=lambda: None), lost=False)
    spaces = SpaceClient(
        None, lambda c, key: types.SimpleNamespace(find=lambda ids, timeout: None), client)

    def gone(space):
        raise kvd.Error("its lease has ended", "ELEASE", 1)
    assert spaces.ask("key", gone) is None and "lease" in spaces.why and not caplog.text
    assert spaces.ask("key", lambda space: True)


# ---- names -----------------------------------------------------------------------------------

def tensors(seed, header=b'{"a": 1}', nbytes=300000):
    """As a safetensors file is made."""
    return len(header).to_bytes(8, "little") + header + bytes([seed]) * nbytes


@pytest.mark.parametrize("change", [
    lambda path: path.write_bytes(tensors(2)), lambda path: path.write_bytes(tensors(1, b"{}" * 4)),
    lambda path: path.write_bytes(tensors(1) + b"x"), lambda path: path.rename(str(path) + ".pt"),
    lambda path: path.with_name("config.json").write_text("{}"),
    lambda path: path.with_name("modeling.py").write_text("pass"),
    lambda path: os.utime(path, ns=(1, 1))])
def test_weights_are_named_by_all_of_their_files(tmp_path, change):
    path = tmp_path / "model.safetensors"
    path.write_bytes(tensors(1))
    os.utime(path, ns=(5, 5))
    first = names.weights_of(str(tmp_path))
    assert names.weights_of(str(tmp_path)) == first and len(first) == 64
    change(path)
    if path.exists() and path.stat().st_mtime_ns != 1:
        os.utime(path, ns=(5, 5))  # times alone are not believed
    names._known.clear()  # it happens within a tick of the file system's clock
    assert names.weights_of(str(tmp_path)) != first


def test_copy_of_weights_has_their_name(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        path = tmp_path / name / "model.safetensors"
        path.write_bytes(tensors(1))
        os.utime(path, ns=(5, 5))
    assert names.weights_of(str(tmp_path / "a")) == names.weights_of(str(tmp_path / "b"))


def test_large_weights_are_read_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr(names, "READ", 2 * names.PIECE)
    path = tmp_path / "model.safetensors"
    found = set()
    for seed in range(3):  # the last byte
        path.write_bytes(tensors(1, nbytes=1 << 20) + bytes([seed]))
        os.utime(path, ns=(5, 5))
        names._known.clear()
        found.add(names.weights_of(str(path)))
    assert len(found) == 3


def test_folder_without_weights_names_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert names.weights_of(str(tmp_path)) is None and names.weights_of("org/model") is None


SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("loaded, revision, commit", [
    (SHA, "main", SHA), (None, SHA, SHA), (None, "main", None), (None, None, None),
    (None, SHA[:10], None), (None, SHA + "0", None), ("", "v1.0", None)])
def test_revision_names_weights_when_it_is_a_commit(loaded, revision, commit):
    assert names.commit_of(loaded, revision) == commit


# ---- vLLM's ----------------------------------------------------------------------------------

def vllm_config(commit=None, load_format="auto", **model):
    text = types.SimpleNamespace(rope_parameters={"rope_theta": 1e4})
    given = dict(model="org/model", hf_overrides={}, revision=None, dtype="torch.bfloat16",
                 quantization=None, hf_text_config=text, max_model_len=4096,
                 hf_config=types.SimpleNamespace(_commit_hash=commit))
    return types.SimpleNamespace(model_config=types.SimpleNamespace(**dict(given, **model)),
                                 load_config=types.SimpleNamespace(load_format=load_format))


def named(*args, given=None, **kw):
    return identity.names(vllm_config(*args, **kw),
                          lambda name, preset: (given or {}).get(name, preset), "scheme")


def test_a_rope_type_that_vllms_model_renames_counts_as_the_one_before():
    def rope(**more):
        text = types.SimpleNamespace(rope_parameters=dict({"rope_theta": 1e4}, **more))
        return named(SHA, hf_text_config=text).rope
    assert rope(rope_type="yarn") == rope(rope_type="deepseek_yarn") \
        == rope(rope_type="deepseek_llama_scaling")
    others = [{}, dict(rope_type="yarn"), dict(rope_type="deepseek_yarn", factor=2.0),
              dict(rope_type="llama3"), dict(rope_type="default")]
    assert len({rope(**more) for more in others}) == len(others)


def test_branch_does_not_name_vllms_weights(caplog):
    assert named(SHA, revision="main") != named(SHA[::-1], revision="main")
    assert not caplog.records
    for config in (vllm_config(revision="main"), vllm_config(SHA, model_weights="s3://bucket"),
                   vllm_config(SHA, hf_config_path="org/other"), vllm_config(SHA, "tensorizer")):
        assert identity.names(config, lambda name, preset: preset, "s").revision is None
    assert caplog.text.count("no chunks are found or saved; set \"revision\"") == 4
    assert named(revision="main", given={"revision": "mine"}).revision == "mine"
    assert SHA in named(revision=SHA).revision
