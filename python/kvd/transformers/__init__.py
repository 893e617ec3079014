# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers that attend to a document whose KV is elsewhere: the
reference client of kvd's routed attention, small enough to read.

    import kvd.transformers as kt

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="kvd")
    place = kt.Place(client, model, tokens=4096)
    reader = kt.Reader(place, document, way="rent")   # document: token ids
    logits = reader.step(question)                    # and so on, a token each

A Place moves a model's KV into and out of chunks; a Reader is one conversation about one document.
The conversation's tokens are attended here; the document's tokens where their KV is (route), after
fetching it (fetch), or after recomputing it (local). All give the same numbers, up to rounding: the
document's KV has the same bytes, and its positions are adapted alike.

geometry   shape of a model's KV and attention, from its configuration
place      KV in pages and chunks
attention  the attention function that transformers calls, and its cache
reader     the ways, and switching between them
home       costs that only this client can measure

Importing this imports torch and transformers, and registers the attention "kvd"."""
from .attention import Cache, attention, mask
from .geometry import Geometry
from .home import home_price
from .place import Place, chunk_ids, revision_of
from .reader import WAYS, Reader, Step

TESTED = ("5.19.0",)  # releases of transformers

__all__ = ["Cache", "Geometry", "Place", "Reader", "Step", "TESTED", "WAYS", "attention",
           "chunk_ids", "home_price", "mask", "revision_of"]
