# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler counts of its load: requests, tokens a second, room in its cache."""
import types

from kvd.vllm.load import Meter


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def request(name, prompt, computed=0):
    return types.SimpleNamespace(request_id=name, num_prompt_tokens=prompt,
                                 num_computed_tokens=computed)


def step(meter, requests, scheduled):
    told = meter.stepped(scheduled)
    for name, tokens in scheduled.items():
        requests[name].num_computed_tokens += tokens
    return told


def test_each_second_is_reported_once():
    clock = Clock()
    meter = Meter(16, clock)
    requests = {n: request(n, 1000) for n in "abc"}
    for one in requests.values():
        meter.arrived(one)
    assert step(meter, requests, {"a": 512}) is None
    clock.now += 0.5
    assert step(meter, requests, {"a": 488}) is None
    clock.now += 0.5
    told = step(meter, requests, {"a": 1, "b": 499})
    assert told == {"running": 2, "waiting": 1, "prompt_tokens_waiting": 2000,
                    "prompt_tokens_s": 1499, "decode_tokens_s": 1}
    assert step(meter, requests, {"a": 1}) is None


def test_requests_computed_elsewhere_do_not_wait():
    clock = Clock()
    meter = Meter(16, clock)
    pulled = request("a", 1000, computed=999)
    meter.arrived(pulled)
    meter.stepped({})
    clock.now += 2
    assert meter.stepped({"a": 3}) == {
        "running": 1, "waiting": 0, "prompt_tokens_waiting": 1, "prompt_tokens_s": 0,
        "decode_tokens_s": 1}


def test_rates_forget_and_ends_are_seen():
    clock = Clock()
    meter = Meter(16, clock)
    meter.pool = types.SimpleNamespace(get_num_free_blocks=lambda: 10, num_gpu_blocks=64)
    one = request("a", 4000)
    meter.arrived(one)
    meter.stepped({})
    clock.now += 1
    assert meter.stepped({"a": 4000})["prompt_tokens_s"] == 4000
    meter.finished(one)
    meter.finished(one)
    clock.now += 1
    told = meter.stepped({})
    assert told["prompt_tokens_s"] == 2000 and told["running"] == told["waiting"] == 0
    assert told["kv_free_tokens"] == 160 and told["kv_total_tokens"] == 1024
    # a request that nobody announced is of decode
    assert meter.stepped({"stranger": 7}) is None
    clock.now += 1
    assert meter.stepped({})["decode_tokens_s"] == 3
