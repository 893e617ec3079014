# SPDX-License-Identifier: Apache-2.0
"""kvd.stores: a store's session, with a daemon and without."""
import types

import kvd
from kvd.stores import door as store_door
from kvd.stores.door import Door
from kvd_daemon import Daemon
from test_vllm_store import Clock, T, daemon, layout_text  # noqa: F401


def test_a_daemon_that_keeps_no_chunks_is_told_once(caplog):
    with Daemon() as daemon, kvd.Client(daemon.socket_path) as c:
        clock = Clock()
        door = Door(lambda: c, lambda c, key: c.space(layout_text(), model="m", scheme="s",
                                                      tokens=T), clock=clock)
        for _ in range(3):
            assert door.ask(None, None) is None
            clock.now += store_door.MUTE_S + 1
        assert caplog.text.count("set chunk_memory") == 1


def test_a_daemon_that_does_not_answer_is_asked_less_and_less(daemon):
    clock, space = Clock(), types.SimpleNamespace(find=lambda ids, timeout: None)
    with kvd.Client(daemon.socket_path) as c:
        door = Door(None, lambda c, key: space, c, clock=clock)

        def silent(space):
            clock.now += store_door.CALL_S
            raise kvd.TimeoutError("no answer", "ENOREPLY", 515)
        pauses = []
        for _ in range(6):
            assert door.ask("key", silent) is None
            pauses.append(door.until - clock.now)
            clock.now = door.until
        assert pauses == [5, 10, 20, 40, 60, 60]
        assert door.ask("key", lambda space: space) is space
        door.ask("key", silent)
        assert door.until - clock.now == 5


def test_a_daemon_that_is_not_there_is_tried_again():
    clock, tried = Clock(), []

    def connect():
        tried.append(1)
        raise kvd.ConnectionError("nobody listens", "ENODAEMON", 1)
    door = Door(connect, None, clock=clock)
    for _ in range(3):
        assert door.ask(None, None) is None
    assert len(tried) == 1 and "nobody listens" not in (door.why or "")
    clock.now += store_door.AWAY_S
    assert door.ask(None, None) is None and len(tried) == 2
    assert "nobody listens" in door.why


def test_spaces_that_are_not_asked_for_any_more_are_closed():
    opened = []

    def opener(client, key):
        opened.append(key)
        return types.SimpleNamespace(find=lambda ids, timeout: None)
    client = types.SimpleNamespace(_kvd=types.SimpleNamespace(poll=lambda: None), lost=False)
    for most, wanted in ((0, "ab"), (1, "aba")):
        opened.clear()
        door = Door(None, opener, client, most=most)
        for key in "aabba":
            assert door.ask(key, lambda space: True)
        assert "".join(opened) == wanted and len(door.spaces) == (most or 2)


def test_chunks_that_have_left_are_no_word_for_the_log(caplog):
    client = types.SimpleNamespace(_kvd=types.SimpleNamespace(poll=lambda: None), lost=False)
    door = Door(None, lambda c, key: types.SimpleNamespace(find=lambda ids, timeout: None), client)

    def gone(space):
        raise kvd.Error("its lease has ended", "ELEASE", 1)
    assert door.ask("key", gone) is None and "lease" in door.why and not caplog.text
    assert door.ask("key", lambda space: True)
