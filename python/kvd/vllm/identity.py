# SPDX-License-Identifier: Apache-2.0
"""Names for an engine's space of chunks: the loaded weights, and other options that change KV
without changing ids. No module of vLLM is imported here."""
import json
import logging
import re

from ..stores.names import commit_of, rope_of, weights_of, word
from .store_plan import Words

logger = logging.getLogger("vllm.kvd")
# Load formats that read the weights from the model's own folder or repository.
FROM_MODEL = ("auto", "bitsandbytes", "dummy", "fastsafetensors", "gguf", "hf", "instanttensor",
              "mistral", "npcache", "pt", "runai_streamer", "runai_streamer_sharded",
              "safetensors", "sharded_state")
RENAMED = re.compile(r'"rope_type": "deepseek_(yarn|llama_scaling)"')


def loaded_commit(model_config):
    """The commit of the loaded configuration, if the weights are from the same place."""
    other = getattr(model_config, "hf_config_path", None)
    return None if other and other != model_config.model else \
        getattr(model_config.hf_config, "_commit_hash", None)


def weights_word(config):
    """A name for the loaded weights. None: they have none."""
    model_config, load_format = config.model_config, str(config.load_config.load_format)
    if getattr(model_config, "model_weights", "") or load_format not in FROM_MODEL:
        return None  # loaded from elsewhere
    return commit_of(loaded_commit(model_config), model_config.revision) or \
        weights_of(str(model_config.model))


def revision_of(config):
    """A name for the weights, and for other options that change KV without changing ids. None:
    these weights cannot be distinguished from others of that name, so they must not be shared."""
    model_config = config.model_config
    weights, overrides = weights_word(config), model_config.hf_overrides
    if weights is None:
        return None
    if callable(overrides):
        raise ValueError("kvd.vllm: hf_overrides is a function, which cannot be compared: set "
                         "\"revision\" in kv_connector_extra_config")
    words = ["weights=%s" % weights, "dtype=%s" % str(model_config.dtype).rsplit(".", 1)[-1],
             "quantization=%s" % model_config.quantization]
    if config.load_config.load_format == "dummy":
        words.append("dummy")
    if overrides:
        words.append("overrides=%s" % json.dumps(overrides, sort_keys=True, default=str))
    return " ".join(words)


def rope_word(model_config):
    """vLLM's models of DeepSeek's kind rename the type in the configuration while they are built.
    A scheduler sees that only in the process of its workers, so it counts as one with "yarn"."""
    return word(RENAMED.sub('"rope_type": "yarn"', rope_of(model_config.hf_text_config,
                                                          model_config.max_model_len)))


def names(config, extra, scheme):
    """Its revision is None if the weights have no name."""
    model = config.model_config
    revision = extra("revision", None)
    if revision is None:
        revision = revision_of(config)
    if revision is None:
        logger.warning("kvd.vllm: cannot identify the weights of %s: no chunks are found or saved; "
                       "set \"revision\" in kv_connector_extra_config to a text that is unique to "
                       "these weights, or load a commit or a local folder", model.model)
    return Words(word(extra("model", None) or model.model),
                 None if revision is None else word(revision), scheme,
                 rope_word(model), 0)
