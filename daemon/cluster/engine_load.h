/* SPDX-License-Identifier: Apache-2.0 */
/* engine_load: the load that an engine reports (session.report). It is valid for
 * ENGINE_LOAD_NS: an engine that hangs or sleeps reports nothing. */
#ifndef KVD_CLUSTER_ENGINE_LOAD_H
#define KVD_CLUSTER_ENGINE_LOAD_H

#include <stdint.h>

/* X(member, "help"): all are counts or counts per second; ENGINE_LOAD_UNKNOWN: not
 * reported */
#define ENGINE_LOADS(X)                                                    \
	X(running, "requests being computed")                              \
	X(waiting, "requests waiting")                                     \
	X(kv_free_tokens, "free tokens of its KV cache")                   \
	X(kv_total_tokens, "capacity of its KV cache in tokens")           \
	X(prompt_tokens_waiting, "prompt tokens still to be computed")     \
	X(prompt_tokens_s, "prompt tokens computed per second while busy") \
	X(decode_tokens_s, "tokens generated per second by all requests")

#define ENGINE_LOAD_NS UINT64_C(10000000000)
#define ENGINE_LOAD_UNKNOWN (-1)
#define ENGINE_LOAD_MOST (INT64_C(1) << 52)

struct engine_load {
#define ENGINE_LOAD_MEMBER(name, help) int64_t name;
	ENGINE_LOADS(ENGINE_LOAD_MEMBER)
#undef ENGINE_LOAD_MEMBER
};
#define ENGINE_LOAD_NONE ((struct engine_load){ENGINE_LOADS(ENGINE_LOAD_IS_UNKNOWN)})
#define ENGINE_LOAD_IS_UNKNOWN(name, help) .name = ENGINE_LOAD_UNKNOWN,

#endif
