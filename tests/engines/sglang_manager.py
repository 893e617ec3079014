#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""SGLang's own disaggregation classes without a model: managers, senders, receivers and
the bootstrap server, a process a rank, with real pools of KV pages.

sglang_manager.py [--nixl kvd|native|nixl]

Every cell of a prefill pool tells its layer, slot, head and column; every cell of a decode
pool is a canary. After each room all of the decode pool is compared with what it must be:
a byte too few, too many or elsewhere fails. Last line: N passed, N failed."""
import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from types import SimpleNamespace as Some

from rig import FOLDER, HOST, Node, Tally, equal, free_ports, logs, pause, python, until
from sglang_pd import BACKEND, environment

FAILED, _, WAITING, _, SUCCESS = range(5)  # SGLang's KVPoll
LAYERS, HEAD, PAGE, PAGES, ROWS, HIDDEN = 3, 8, 4, 160, 16, 32
CANARY = 0x7a7a7a7a


class Rank:
    """One rank of prefill or decode, in a process of its own."""

    def __init__(self, spec):
        self.spec, self.handles = Some(**spec), {}
        self.publish()
        self.buffers()
        self.manager = self.make_manager()

    def publish(self):
        """As the scheduler's process does before it makes a scheduler."""
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
        from sglang.srt.server_args import ServerArgs
        load_plugins()
        spec = self.spec
        self.args = ServerArgs(
            model_path=os.path.join(FOLDER, "sglang", "bytes"), device="cpu",
            attention_backend="torch_native", host=HOST, port=spec.http, tp_size=spec.tp,
            pp_size=spec.pp, page_size=PAGE, disaggregation_mode=spec.mode,
            disaggregation_transfer_backend=BACKEND[spec.nixl],
            disaggregation_bootstrap_port=spec.port,
            disaggregation_decode_retraction_backup="none")
        world_rank = spec.stage * spec.tp + spec.rank
        publish(self.args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=0))
        get_parallel().override_permanently(pp_group=Some(
            rank_in_group=spec.stage, world_size=spec.pp, broadcast_object=self.broadcast,
            is_last_rank=spec.stage == spec.pp - 1))

    def broadcast(self, thing, src):
        """From the first pipeline stage, as gloo would."""
        path = os.path.join(FOLDER, "logs", "stages-%d" % self.spec.port)
        if self.spec.stage == src:
            with open(path + ".new", "w") as out:
                json.dump(thing, out)
            os.rename(path + ".new", path)
            return thing
        assert until(lambda: os.path.exists(path), 60), "no word of stage %d" % src
        with open(path) as told:
            return json.load(told)

    def buffers(self):
        import torch
        from sglang.srt.disaggregation.utils import MetadataBuffers
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        spec = self.spec
        self.heads = max(1, spec.heads // spec.tp)
        begin, end = ((spec.stage + i) * LAYERS // spec.pp for i in (0, 1))
        self.places = [kv * LAYERS + i for kv in (0, 1) for i in range(begin, end)]
        self.pool = MHATokenToKVPool(
            size=(PAGES - 1) * PAGE, page_size=PAGE, dtype=torch.float32, head_num=self.heads,
            head_dim=HEAD, layer_num=end - begin, start_layer=begin, device="cpu",
            enable_memory_saver=False)
        self.meta = MetadataBuffers(ROWS, HIDDEN, torch.float32, max_sampling_mask_tokens=16)
        tensors = list(self.pool.k_buffer) + list(self.pool.v_buffer)
        self.cells = [t.view(torch.int32).numpy() for t in tensors]
        for i, cells in enumerate(self.cells):
            cells[...] = self.pattern(i) if spec.mode == "prefill" else CANARY
        self.wanted = [cells.copy() for cells in self.cells]

    def pattern(self, buffer):
        """By places in the whole model; neighbour ranks share a head when there are few."""
        import numpy as np
        slots = np.arange(PAGES * PAGE).reshape(-1, 1, 1)
        first = self.spec.rank * self.spec.heads // self.spec.tp
        heads = (first + np.arange(self.heads)).reshape(1, -1, 1)
        at = ((self.places[buffer] * 4096 + slots) * 64 + heads) * HEAD + np.arange(HEAD)
        return at.astype(np.int32)

    def make_manager(self):
        """By the engine's own code, with a stand-in for the queue that it is part of."""
        import sglang.srt.disaggregation.decode as decode
        import sglang.srt.disaggregation.prefill as prefill
        from sglang.srt.disaggregation.utils import TransferBackend
        from sglang.srt.managers.disagg_service import start_disagg_service
        spec = self.spec
        self.backend = TransferBackend(BACKEND[spec.nixl])
        queue = Some(
            transfer_backend=self.backend, tp_rank=spec.rank, pp_rank=spec.stage,
            token_to_kv_pool=self.pool, draft_token_to_kv_pool=None, is_mla_backend=False,
            metadata_buffers=self.meta, req_to_token_pool=None, enable_staging=False,
            scheduler=Some(
                rust_server=None, enable_hisparse=False, server_args=self.args,
                req_to_token_pool=None,
                tp_worker=Some(model_runner=Some(kv_cache_dtype_str="float32")),
                model_config=Some(hf_text_config=None, num_hidden_layers=LAYERS,
                                  get_total_num_kv_heads=lambda: spec.heads)))
        if spec.mode == "decode":
            return decode.DecodePreallocQueue._init_kv_manager(queue)
        if spec.rank == spec.stage == 0:
            self.bootstrap = start_disagg_service()
        return prefill.PrefillBootstrapQueue._init_kv_manager(queue)

    def kind(self, name):
        from sglang.srt.disaggregation.utils import KVClassType, get_kv_class
        return get_kv_class(self.backend, KVClassType[name])

    # ---- prefill ----

    def sender(self, room):
        self.handles[room] = self.kind("SENDER")(
            mgr=self.manager, bootstrap_addr="%s:%d" % (HOST, self.spec.port),
            bootstrap_room=room, req_has_disagg_prefill_dp_rank=False)

    def begin(self, room, pages, row):
        """The metadata row as the scheduler fills it."""
        self.handles[room].pop_decode_prefix_len()
        self.meta.output_ids[row] = room % 1000
        self.meta.output_hidden_states[row] = float(room % 1000)
        self.meta.bootstrap_room[row, 0] = room
        self.handles[room].init(pages, row)

    def send(self, room, pages, last):
        import numpy as np
        if self.handles[room].should_send_kv_chunk(len(pages), last):
            self.handles[room].send(np.array(pages, np.int32), None)

    def moved(self, room):
        return self.handles[room].get_transfer_metric().transfer_total_bytes

    def page_bytes(self):
        return sum(self.manager.kv_args.kv_item_lens)

    # ---- decode ----

    def receiver(self, room):
        address = "%s:%d" % (HOST, self.spec.port)
        assert until(lambda: self.manager.try_ensure_parallel_info(address), 30)
        self.handles[room] = self.kind("RECEIVER")(
            mgr=self.manager, bootstrap_addr=address, bootstrap_room=room)
        self.handles[room].init(0)
        return int(self.handles[room].poll())

    def metadata(self, room, pages, row):
        import numpy as np
        self.meta.clear_slot(row)
        self.handles[room].send_metadata(np.array(pages, np.int32), row, None,
                                         decode_prefix_len=0)

    def row(self, row):
        return [int(self.meta.bootstrap_room[row, 0]), int(self.meta.output_ids[row, 3]),
                float(self.meta.output_hidden_states[row, HIDDEN - 1])]

    def expect(self, src, dst):
        for i, wanted in enumerate(self.wanted):
            source = self.pattern(i)
            for s, d in zip(src, dst):
                wanted[d * PAGE:(d + 1) * PAGE] = source[s * PAGE:(s + 1) * PAGE]

    def wrong(self):
        return sum(int((a != b).sum()) for a, b in zip(self.cells, self.wanted))

    # ---- both ----

    def wait(self, room, status, seconds=30):
        """Polls as the event loop does, until this status or an end."""
        end = time.monotonic() + seconds
        while True:
            now = int(self.handles[room].poll())
            if now in (status, FAILED, SUCCESS) or time.monotonic() > end:
                return now
            pause(0.001)

    def abort(self, room):
        self.handles[room].abort()

    def clear(self, room):
        self.handles.pop(room).clear()


def rank_main(line, spec, log, node, kind):
    os.environ.update(node)
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        rank = kind(spec)
        line.send((True, None))
    except BaseException:
        line.send((False, traceback.format_exc()))
        os._exit(1)
    while True:
        try:
            name, args = line.recv()
        except EOFError:
            os._exit(0)
        try:
            line.send((True, getattr(rank, name)(*args)))
        except BaseException as error:
            traceback.print_exc()
            line.send((False, "%s: %s" % (type(error).__name__, error)))


class Remote:
    """A Rank in its process; its methods are called there."""

    def __init__(self, spec, log, node, kind):
        fork = multiprocessing.get_context("fork")
        self.line, theirs = fork.Pipe()
        self.proc = fork.Process(target=rank_main, args=(theirs, spec, log, node, kind))
        self.proc.start()
        theirs.close()

    def answer(self, seconds=60):
        if not self.line.poll(seconds):
            raise TimeoutError("a rank does not answer")
        fine, value = self.line.recv()
        if not fine:
            raise RuntimeError(value)
        return value

    def __getattr__(self, name):
        def call(*args):
            self.line.send((name, args))
            return self.answer()
        return call

    def end(self):
        if self.proc.is_alive():
            os.kill(self.proc.pid, signal.SIGKILL)
        self.proc.join()
        self.line.close()


def every(ranks, name, *args):
    return [getattr(rank, name)(*args) for rank in ranks]


class Group:
    """Prefill and decode ranks around one bootstrap server."""

    def __init__(self, name, nodes, prefill=1, decode=1, heads=2, kind=Rank,
                 stages=1):
        spec = dict(heads=heads, port=free_ports(), http=free_ports(), nixl=nodes[0].nixl)
        self.sides = []
        for mode, tp, pp, node in (("prefill", prefill, stages, nodes[0]),
                                   ("decode", decode, 1, nodes[1])):
            self.sides.append([Remote(
                dict(spec, mode=mode, tp=tp, rank=rank, pp=pp, stage=stage),
                os.path.join(logs(name), "%s-%d-of-%d.log" % (mode, stage * tp + rank, tp * pp)),
                dict(node.env()), kind) for stage in range(pp) for rank in range(tp)])
        self.prefill, self.decode = self.sides

    def __enter__(self):
        try:
            for rank in self.prefill + self.decode:
                rank.answer(300)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc):
        for rank in self.decode + self.prefill:
            rank.end()

    def all_are(self, ranks, room, status, seconds=30):
        equal(every(ranks, "wait", room, status, seconds), [status] * len(ranks),
              "status of room %d" % room)

    def intact(self):
        equal(every(self.decode, "wrong"), [0] * len(self.decode), "cells that are wrong")

    def open(self, room, dst, row, prefill_first=False):
        if prefill_first:
            every(self.prefill, "sender", room)
        equal(every(self.decode, "receiver", room), [WAITING] * len(self.decode), "receiver")
        if not prefill_first:
            every(self.prefill, "sender", room)
        every(self.decode, "metadata", room, dst, row)
        self.all_are(self.prefill, room, WAITING)

    def clear(self, room):
        every(self.prefill + self.decode, "clear", room)

    def room(self, room, src, dst, chunks=None, rows=(1, 2), prefill_first=False):
        """All of a room; chunks: how many pages each send has."""
        self.open(room, dst, rows[1], prefill_first)
        every(self.prefill, "begin", room, len(src), rows[0])
        at = 0
        for n in chunks or [len(src)]:
            every(self.prefill, "send", room, src[at:at + n], at + n == len(src))
            at += n
        self.all_are(self.prefill, room, SUCCESS)
        self.all_are(self.decode, room, SUCCESS)
        every(self.decode, "expect", src, dst)
        for row in every(self.decode, "row", rows[1]):
            equal(row, [room, room % 1000, float(room % 1000)], "the metadata row")
        self.intact()
        if src and len(self.prefill) == len(self.decode):
            equal(every(self.prefill, "moved", room)[0],
                  len(src) * self.prefill[0].page_bytes(), "bytes told")
        self.clear(room)


def many(group, first, count):
    """All open at once, their chunks in turns, ended in another order."""
    rooms = range(first, first + count)
    src = {r: [(3 * r + k) % (PAGES - 1) + 1 for k in range(1 + r % 3)] for r in rooms}
    free = list(range(100, 159))
    dst = {r: [free.pop() for _ in src[r]] for r in rooms}
    for r in rooms:
        group.open(r, dst[r], r % ROWS, r % 2)
        every(group.prefill, "begin", r, len(src[r]), r % ROWS)
    for k in range(3):
        for r in rooms:
            if k < len(src[r]):
                every(group.prefill, "send", r, src[r][k:k + 1], k + 1 == len(src[r]))
    for r in reversed(rooms):
        group.all_are(group.prefill, r, SUCCESS)
        group.all_are(group.decode, r, SUCCESS)
        every(group.decode, "expect", src[r], dst[r])
    group.intact()
    for r in rooms:
        group.clear(r)


def aborted(group, room):
    """Nothing may be written to pages that decode took back."""
    group.open(room, [90, 91], 3)
    every(group.decode, "abort", room)
    group.all_are(group.decode, room, FAILED)
    group.all_are(group.prefill, room, FAILED)
    every(group.prefill, "begin", room, 2, 3)
    every(group.prefill, "send", room, [8, 9], True)
    pause(0.3)
    group.intact()
    group.clear(room)


def bad_page(name, nodes):
    """A page far outside the pool: both ends are told. kvd's own backend hears of it from
    decode's daemon, before prefill has sent anything."""
    with Group(name, nodes) as group:
        if nodes[0].nixl == "native":
            every(group.decode, "receiver", 1)
            every(group.prefill, "sender", 1)
            every(group.decode, "metadata", 1, [7, 1 << 30], 3)
        else:
            group.open(1, [7, 1 << 30], 3)
            every(group.prefill, "begin", 1, 2, 3)
            every(group.prefill, "send", 1, [8, 9], True)
        group.all_are(group.prefill, 1, FAILED)
        group.all_are(group.decode, 1, FAILED)


def prefill_dies(name, nodes):
    with Group(name, nodes) as group:
        group.open(1, [90, 91], 3)
        group.prefill[0].end()
        group.all_are(group.decode, 1, FAILED, 50)
        group.prefill.clear()


def unequal(name, nodes, prefill, decode, heads):
    with Group(name, nodes, prefill, decode, heads) as group:
        group.room(51, [3, 4, 9, 11], [20, 21, 30, 7], chunks=[3, 1])
        group.room(52, [12], [40], prefill_first=True)


def equal_ranks(name, nodes, check):
    with Group(name, nodes) as group:
        check("one chunk, decode first", group.room, 11, [3, 4, 5], [7, 8, 9])
        check("one chunk, prefill first", group.room, 12, [6], [10], prefill_first=True)
        check("scattered pages", group.room, 14, [9, 3, 17, 4, 40], [31, 30, 39, 33, 36])
        check("three chunks", group.room, 15, [50, 51, 52, 10, 11, 12],
              [40, 42, 44, 45, 46, 50], chunks=[1, 3, 2])
        check("another metadata row", group.room, 16, [60, 61], [52, 53], rows=(4, 5))
        check("no page at all", group.room, 17, [], [], rows=(6, 7))
        check("a room's number again", group.room, 11, [71, 72], [56, 57])
        check("24 rooms at once", many, group, 1000, 24)
        check("decode aborts", aborted, group, 30)
        check("a room after it", group.room, 32, [80, 81], [70, 71])


def inside(doc, name, backends):
    """The arguments, in the engine's Python."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--nixl", default=backends[0], choices=backends)
    parser.add_argument("--name", default=name)
    args = parser.parse_args()
    if not os.environ.get("KVD_ENGINES_INSIDE"):
        env = environment(args.nixl, Node("nixl", "none"))
        os.execve(python("sglang"), [python("sglang")] + sys.argv,
                  dict(env, KVD_ENGINES_INSIDE="1"))
    import sglang.srt.disaggregation.decode  # noqa: F401 (once, and forked)
    import sglang.srt.disaggregation.prefill  # noqa: F401
    return args


def main():
    args = inside(__doc__, "sglang-manager", ["kvd", "native", "nixl"])
    tally = Tally()
    with Node(args.nixl, "p") as p, Node(args.nixl, "d") as d:
        nodes = (p, d)
        tally.check("equal ranks", equal_ranks, args.name, nodes, tally.check)
        for ranks in ((2, 2, 4), (2, 1, 4), (1, 2, 4), (4, 1, 2), (1, 4, 2)):
            tally.check("prefill TP %d, decode TP %d, %d heads" % ranks, unequal, args.name,
                        nodes, *ranks)
        tally.check("a page that is not there", bad_page, args.name, nodes)
        tally.check("prefill dies", prefill_dies, args.name, nodes)
        tally.add("bytes went by the daemons", p.used() and d.used())
    return tally.close(args.name)


if __name__ == "__main__":
    sys.exit(main())
