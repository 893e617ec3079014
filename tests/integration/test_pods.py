#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two daemons of one boot in two network namespaces, joined by veth, as pods of a node are:
each sees its own files at the same run_dir, or both the same. By which transport they
meet, and what they say of it."""
import contextlib
import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "lib"))
sys.path.insert(0, os.path.join(HERE, "faults"))
from kvd_daemon import BUILD, DEADLINE_S, Daemon, Skip, run  # noqa: E402
from kvd_engine import FAILED, SUCCESS, Cache, Engine, open_push  # noqa: E402
from world import Net, may_mount, may_partition  # noqa: E402

NEEDS = "shm needs a network namespace or run_dir shared by both daemons"
CONFIG = "[peer]\nlisten = tcp://%s:%d\ninsecure = yes\n[transport]\ntransports = %s\n"
ENTER = 'cp "$2" "$0" && mount --bind "$0" "$1" && shift 2 && exec "$@"'
TOKENS = 40


class Pod:
    """A daemon that sees the folder `files` as its run_dir."""

    def __init__(self, net, index, run_dir, files, name, transports, config, env):
        wrapper = net.wrapper(index) + ["sh", "-c", ENTER, files, run_dir,
                                        os.path.join(run_dir, name + ".conf")]
        self.endpoint = "tcp://%s:%d" % net.address(index)
        self.socket = os.path.join(files, name + ".sock")
        self.config = config % (net.address(index) + (transports,))
        self.files, self.net = files, net
        self.daemon = Daemon(self.config, run_dir=run_dir, name=name, wrapper=wrapper,
                             env=env, log_dir=files)
        self.daemon.expect("insecure: ")
        self.start()

    def start(self):
        self.daemon.write_config(self.config)  # another's may lie there
        self.daemon.start().wait_ready()

    def restart(self):
        self.daemon.stop()
        self.daemon.notify.close()
        self.start()

    def engine(self, name):
        return Engine(self.daemon, name, self.socket)

    def ctl(self, *args):
        done = subprocess.run([BUILD + "/kvd-ctl", "--socket", self.socket] + list(args),
                              capture_output=True, text=True, timeout=DEADLINE_S)
        return done.stdout + done.stderr


@contextlib.contextmanager
def two_pods(names=("kvd", "kvd"), shared=False, transports="auto", config=CONFIG, env=None):
    why = may_mount() or may_partition()
    if why:
        raise Skip("network and mount namespaces: " + why)
    with contextlib.ExitStack() as after:
        folder = after.enter_context(tempfile.TemporaryDirectory(prefix="kvd-pods-"))
        run_dir, pods = os.path.join(folder, "run"), []
        os.mkdir(run_dir)
        net = Net(2, True)
        after.callback(net.close)
        for i, name in enumerate(names):
            files = os.path.join(folder, "both" if shared else "pod%d" % i)
            os.makedirs(files, exist_ok=True)
            pods.append(Pod(net, i, run_dir, files, name, transports, config, env))
            after.push(pods[-1].daemon.__exit__)
        yield pods


def peer_of(engine):
    return engine.cmd("peer.list")["peers"][0]


def a_room_each_way(pods):
    engines = [pod.engine("e%d" % i) for i, pod in enumerate(pods)]
    caches = [(Cache(e, name="src"), Cache(e, name="dst")) for e in engines]
    for room, (a, b) in enumerate(((0, 1), (1, 0)), 1):
        pages = [3, 9, 4]
        caches[a][0].fill(pages, TOKENS)
        open_push(engines[a], engines[b], caches[a][0], caches[b][1], room, pages, pages,
                  TOKENS)
        engines[b].until(room, "recv", SUCCESS)
        engines[a].until(room, "send", SUCCESS)
        caches[b][1].check(pages, TOKENS)
    return engines


def pods_sharing_nothing_use_tcp_with_reason():
    """Also where the path of the peer's socket is a socket here: their own."""
    for names in (("kvd", "kvd"), ("prefill", "decode")):
        with two_pods(names) as pods:
            for pod in pods:
                pod.daemon.expect("a preferred transport was skipped")
            engines = a_room_each_way(pods)
            why = "another daemon's" if names[0] == names[1] else "No such file"
            for pod, engine in zip(pods, engines):
                peer = peer_of(engine)
                assert peer["transport"] == "tcp" and peer["same_host"], peer
                assert NEEDS in peer["passed_over"] and why in peer["passed_over"], peer
                assert "tcp+aes128gcm (not shm)" in pod.ctl("peers")
                doctor = json.loads(pod.ctl("-j", "doctor"))["checks"]
                assert [c for c in doctor if c["check"] == "peers" and c["result"] == "warn"
                        and NEEDS in c["fact"] and c["remedy"]], doctor
                log = pod.daemon.log()
                assert log.count("a preferred transport was skipped") == 1, log
                assert NEEDS in log, log
                engine.close()


def pods_sharing_run_dir_use_shm_also_after_restart():
    with two_pods(("prefill", "decode"), shared=True) as pods:
        for again in range(2):
            engines = a_room_each_way(pods)
            for engine in engines:
                peer = peer_of(engine)
                assert peer["transport"] == "shm" and "passed_over" not in peer, peer
                engine.close()
            if not again:
                pods[1].restart()


def pods_with_shm_only_name_its_requirements():
    with two_pods(transports="shm") as pods:
        for pod in pods:
            pod.daemon.expect("no data connection")
        engines = [pod.engine("e") for pod in pods]
        for engine, other in zip(engines, reversed(pods)):
            words = engine.refused("EREQUIRE", "peer.connect", endpoint=other.endpoint)
            assert "no transport: " in words and NEEDS in words, words
        cache = Cache(engines[1])
        engines[1].cmd("room.open", room="1", role="recv", pool=cache.pool,
                       sources=[pods[0].endpoint])
        error = engines[1].until(1, "recv", FAILED)[1]
        assert error["code"] == "EREQUIRE" and NEEDS in error["message"], error
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    run([pods_sharing_nothing_use_tcp_with_reason,
         pods_sharing_run_dir_use_shm_also_after_restart,
         pods_with_shm_only_name_its_requirements])
