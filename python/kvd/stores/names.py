# SPDX-License-Identifier: Apache-2.0
"""What a space is called. Two engines share chunks when all of its words are equal, so that what
changes KV without changing ids is in one of them."""
import hashlib
import json
import os
import re

WORD_MAX = 200  # bytes of a space's word


def word(text):
    """As a space takes it; a long one keeps its head, and a digest of all of it."""
    text = "".join(c if c.isprintable() else "?" for c in str(text))
    if len(text.encode()) <= WORD_MAX:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    return text.encode()[:WORD_MAX - 40].decode(errors="ignore") + " … " + digest


def weights_of(model):
    """What tells one state of a file or a folder of weights from another; None: nothing."""
    files = [model] if os.path.isfile(model) else [
        os.path.join(model, name) for name in sorted(os.listdir(model))
        if re.search(r"\.(safetensors|bin|pt|pth|gguf|json)$", name)] \
        if os.path.isdir(model) else []
    digest = hashlib.sha256()
    for path in files:
        stat = os.stat(path)
        digest.update(("%s %d %d\n" % (os.path.basename(path), stat.st_size,
                                       stat.st_mtime_ns)).encode())
    return digest.hexdigest()[:32] if files else None


def rope_of(hf_config, length):
    """How positions are encoded."""
    told = getattr(hf_config, "rope_parameters", None) or {
        name: getattr(hf_config, name) for name in ("rope_theta", "rope_scaling")
        if getattr(hf_config, name, None) is not None}
    text = json.dumps(told, sort_keys=True, default=str) if told else ""
    if "longrope" in text or "dynamic" in text:  # these look at how long a prompt may be
        text = "%d of %s" % (length, text)
    return text
