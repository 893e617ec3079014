# SPDX-License-Identifier: Apache-2.0
"""Who holds what, as the engines' own functions answered (tests/golden), asked by an
adapter's way; and what is refused."""
import json
import os

import pytest

from conftest import ROOT
from kvd import InvalidError, shards


def golden(name, *members):
    """Cases of a file whose input has these members."""
    with open(os.path.join(ROOT, "tests", "golden", name + ".json")) as text:
        cases = [c for c in json.load(text)["cases"] if set(members) <= set(c["in"])]
    assert cases
    return pytest.mark.parametrize("case", cases, ids=[c["id"] for c in cases])


@golden("sglang_rank_mapping")
def test_sglang_ranks_are_sglangs(case):
    given, want = case["in"], case["expect"]
    ask = dict(prefill_tp=given["p_tp"], prefill_cp=given["p_cp"], prefill_pp=given["p_pp"],
               decode_tp=given["d_tp"], decode_pp=given["d_pp"], decode_rank=given["d_rank"],
               decode_pp_rank=given["d_pp_rank"], mla=given["mla"],
               hybrid_mla=given["hybrid_mla"], all_cp=given["all_cp"])
    if want.get("error"):
        with pytest.raises(InvalidError):
            shards.sglang_ranks(**ask)
        return
    ranks = shards.sglang_ranks(**ask)
    assert [list(ranks.tp), list(ranks.cp), list(ranks.pp)] == [
        want["target_tp_ranks"], want["target_cp_ranks"], want["target_pp_ranks"]]
    assert ranks.dst_info == want["required_dst_info_num"]
    assert ranks.responses == want["required_prefill_response_num"]
    assert ranks.dummies == any(c["is_dummy"] for c in want["connections_in_order"])


@golden("vllm_tp_mapping")
def test_vllm_sources_are_vllms(case):
    given = case["in"]
    assert [shards.vllm_sources(tp_size=given["tp_size"], tp_rank=given["tp_rank"],
                                remote_tp_size=given["remote_tp_size"],
                                kv_heads=given["total_kv_heads"], mla=given["is_mla"],
                                state=group == "ssm")
            for group in given["groups"]] == case["expect"]["source_ranks_per_group"]


@golden("sglang_pages_and_chunks", "chunked_prefill_size")
def test_chunks_are_sglangs(case):
    given = case["in"]
    sends = shards.chunks(given["prompt_len"], page_size=given["page_size"],
                          chunk=given["chunked_prefill_size"],
                          prefix=given["decode_prefix_len"])
    assert [([c.tokens.start, c.tokens.stop], [c.pages.start, c.pages.stop], c.last)
            for c in sends] == [(s["token_range"], s["index_slice"], s["is_last"])
                                for s in case["expect"]["sends"]]


@golden("sglang_pages_and_chunks", "grid_tokens")
def test_grid_is_sglangs(case):
    given = case["in"]
    pieces = shards.grid(given["start"], given["end"], base=given["base"],
                         step=given["grid_tokens"])
    assert [[p.start, p.stop] for p in pieces] == case["expect"]["segments"]


@golden("sglang_dcp_plan")
def test_dcp_tokens_are_sglangs(case):
    given = case["in"]
    for rank in case["expect"]["per_rank"]:
        assert shards.dcp_tokens(
            given["src_pages"], given["dst_pages"], page_size=given["page"],
            size=given["size"], rank=rank["dcp_rank"], chunk_page=given.get("off", 0),
            prefix=given.get("prefix", 0), tokens=given.get("ntok", 0)) == (
                rank["src_tokens"], rank["dst_tokens"])


@golden("vllm_block_ids", "sliding_window")
def test_window_blocks_are_vllms(case):
    given, blocks = case["in"], case["in"]["blocks"]
    kept = shards.vllm_window_blocks(given["sliding_window"], given["block_size"],
                                     len(blocks))
    assert blocks[len(blocks) - kept:] == case["expect"]["clipped"]


@golden("vllm_mamba_conv_offsets", "block_len")
def test_blocks_per_page_are_vllms(case):
    assert shards.vllm_blocks_per_page(sum(case["in"]["ssm_sizes"]),
                                       case["in"]["block_len"]) == \
        case["expect"]["physical_per_logical"]


def test_units_and_pages_are_shared_evenly():
    assert [shards.units(8, 4, rank) for rank in range(4)] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert [shards.units(2, 4, rank) for rank in range(4)] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert [shards.cp_pages(10, 4, rank) for rank in range(4)] == [
        range(0, 3), range(3, 6), range(6, 8), range(8, 10)]


@pytest.mark.parametrize("call", [
    lambda: shards.units(6, 4, 0), lambda: shards.units(8, 0, 0),
    lambda: shards.sglang_ranks(prefill_tp=3, decode_tp=2, decode_rank=0),
    lambda: shards.vllm_sources(tp_size=3, tp_rank=0, remote_tp_size=2, kv_heads=6),
    lambda: shards.vllm_sources(tp_size=1, tp_rank=0, remote_tp_size=1 << 30, kv_heads=6),
    lambda: shards.cp_pages(4, 0, 0), lambda: shards.cp_pages(4, 2, 2),
    lambda: shards.dcp_tokens([1], [2], page_size=4, size=0, rank=0),
    lambda: shards.dcp_tokens([1], [2], page_size=4, size=2, rank=2),
    lambda: shards.dcp_tokens([1], [1 << 32], page_size=4, size=2, rank=0),
    lambda: shards.chunks(100, page_size=0), lambda: shards.chunks(100, page_size=4, prefix=101),
    lambda: shards.chunks(1 << 60, page_size=4), lambda: shards.chunks(1 << 40, page_size=4, chunk=1),
    lambda: shards.chunks(-1, page_size=4),
    lambda: shards.grid(5, 3, base=0, step=4), lambda: shards.grid(1, 9, base=2, step=4),
    lambda: shards.grid(0, 9, base=0, step=0), lambda: shards.grid(0, 1 << 40, base=0, step=1),
    lambda: shards.vllm_blocks_per_page(10, 0), lambda: shards.vllm_window_blocks(512, 0, 4)])
def test_what_cannot_be_is_refused(call):
    with pytest.raises((ValueError, InvalidError)):
        call()
