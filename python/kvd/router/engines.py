# SPDX-License-Identifier: Apache-2.0
"""The requests that each engine's two servers are sent.

vLLM, pull: prefill is asked for one token, and the kv_transfer_params of its answer are passed to
decode. vLLM, push (prefill has a bootstrap server), and SGLang: both are sent the request at once,
with the same random number, the room. A client's own parameters of this kind are removed: they
could name the cache of another request, or another host."""
import json
import math
import secrets

from .errors import Refused

BATCH_MAX = 1024
ROOMS = (1 << 63) - 1
PULL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
        "remote_block_ids": None, "remote_host": None, "remote_port": None}
# set by the router alone; vLLM takes them from these, too
HANDOVER = ("kv_transfer_params", "ec_transfer_params")
# these contradict one token that is not streamed, or make prefill's answer long
NOT_FIRST = ("stream_options", "min_tokens", "prompt_logprobs", "return_token_ids", "echo")
PROMPT_LOGPROBS = ("prompt_logprobs", "prompt_logprob_token_ids")
OPENAI = ("/v1/completions", "/v1/chat/completions")
SGLANG_ROUTING = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key",
                  "decode_tp_size", "disagg_prefill_dp_rank", "routed_dp_rank",
                  "data_parallel_rank")
BYTES_A_TOKEN = 4


def room():
    return 1 + secrets.randbelow(ROOMS)


def packed(body):
    return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()


def parse(text):
    """A client's body; Refused."""
    def constant(word):
        raise ValueError("%s is not JSON" % word)
    try:
        body = json.loads(text.decode("utf-8"), parse_constant=constant)
        if isinstance(body, dict):
            packed(body)  # 1e999 is infinite, and no engine accepts it
    except (ValueError, RecursionError) as why:
        raise Refused(400, "the body is not JSON: %.200s" % why) from None
    if not isinstance(body, dict):
        raise Refused(400, "the body is not a JSON object")
    return body


def sequences(prompt):
    """Number of prompts; None: one, not in a list."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        return len(prompt)
    return None


def _samples(body, name="n"):
    """The number that engines read: they accept "2" and 2.0, too."""
    n = body.get(name)
    try:
        return int(float(n)) if isinstance(n, (int, float, str)) else 1
    except (ValueError, OverflowError):
        return 1


def estimate(body, size):
    """Estimated tokens of the prompt, to be compared by a policy."""
    prompt = body.get("input_ids", body.get("prompt"))
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], list):
            return sum(len(one) for one in prompt if isinstance(one, list)) or 1
        if not isinstance(prompt[0], str):
            return len(prompt)
    return max(1, math.ceil(size / BYTES_A_TOKEN))


class Vllm:
    paths = OPENAI
    decode_computes = True  # prompts, without a prefill server

    def check(self, path, body):
        """Refused if this engine would compute a wrong result."""

    def alone(self, path, body):
        """kv_transfer_params name the cache of one prompt, which is read once: requests for several
        sequences are computed on decode. So are those for logprobs of the prompt's tokens: vLLM
        computes them in the server that answers, whatever cache it is given."""
        embeds = body.get("prompt_embeds")
        return (sequences(body.get("prompt")) or 1) != 1 or _samples(body) > 1 or \
            bool(body.get("use_beam_search")) or isinstance(embeds, list) or \
            (embeds is not None and body.get("prompt") is not None) or \
            self._whole(path, body)

    @staticmethod
    def _whole(path, body):
        """Whether the answer covers each of the prompt's tokens."""
        chat = path == "/v1/chat/completions"  # its top_logprobs is 0 unless set
        return any(body.get(name) is not None for name in PROMPT_LOGPROBS) or \
            (bool(body.get("echo")) and (chat or body.get("logprobs") is not None))

    @staticmethod
    def _own(body):
        """Without a client's parameters of HANDOVER. vllm_xargs reach vLLM's scheduler."""
        own, extra = {k: v for k, v in body.items() if k not in HANDOVER}, body.get("vllm_xargs")
        if isinstance(extra, dict):
            own["vllm_xargs"] = {k: v for k, v in extra.items() if k not in HANDOVER}
        return own

    def lone(self, body):
        return packed(dict(self._own(body), kv_transfer_params=None))

    def bodies(self, path, body, prefill):
        """(prefill's, decode's; None: it follows from prefill's answer)."""
        body = self._own(body)
        first = {k: v for k, v in body.items() if k not in NOT_FIRST}
        first.update(max_tokens=1, stream=False)
        if "max_completion_tokens" in body:
            first["max_completion_tokens"] = 1
        if prefill.bootstrap is None:
            return packed(dict(first, kv_transfer_params=PULL)), None
        number, (host, port) = room(), prefill.bootstrap
        first["kv_transfer_params"] = {"do_remote_decode": True, "bootstrap_room": number}
        return packed(first), packed(dict(body, kv_transfer_params={
            "do_remote_prefill": True, "bootstrap_host": host, "bootstrap_port": port,
            "bootstrap_room": number}))

    def follow(self, body, answer):
        """Decode's body, from prefill's answer; ValueError."""
        try:
            said = json.loads(answer)
        except RecursionError:
            raise ValueError("nested too deep") from None
        if not isinstance(said, dict):
            raise ValueError("not a JSON object")
        params = said.get("kv_transfer_params")
        if params is not None and not isinstance(params, dict):
            raise ValueError("kv_transfer_params: not a JSON object")
        return packed(dict(self._own(body), kv_transfer_params=params))


class Sglang:
    paths = OPENAI + ("/generate",)
    decode_computes = False

    def check(self, path, body):
        sampling = body.get("sampling_params") if path == "/generate" else body
        for one in sampling if isinstance(sampling, list) else [sampling]:
            if isinstance(one, dict) and _samples(one) > 1:
                raise Refused(400, "n: %d; SGLang's prefill and decode servers support n = 1" %
                              _samples(one))
        size = self._batch(path, body)
        if size is not None and size > BATCH_MAX:
            raise Refused(400, "%d prompts in one request, at most %d" % (size, BATCH_MAX))

    def alone(self, path, body):
        return False

    def _batch(self, path, body):
        """Number of prompts; None: one, not in a list."""
        if path == "/v1/completions":
            return sequences(body.get("prompt"))
        if path != "/generate":
            return None
        if body.get("text") is not None:
            return len(body["text"]) if isinstance(body["text"], list) else None
        if body.get("input_ids") is not None:
            return sequences(body["input_ids"])
        embeds = body.get("input_embeds")
        batch = isinstance(embeds, list) and embeds and isinstance(embeds[0], list) and \
            embeds[0] and isinstance(embeds[0][0], list)
        return len(embeds) if batch else None

    def bodies(self, path, body, prefill):
        host, port = prefill.bootstrap
        size = self._batch(path, body)
        own = {k: v for k, v in body.items() if k not in SGLANG_ROUTING}
        if size is None:
            own.update(bootstrap_host=host, bootstrap_port=port, bootstrap_room=room())
        else:
            own.update(bootstrap_host=[host] * size, bootstrap_port=[port] * size,
                       bootstrap_room=[room() for _ in range(size)])
        text = packed(own)
        return text, text


BY_NAME = {"vllm": Vllm(), "sglang": Sglang()}
