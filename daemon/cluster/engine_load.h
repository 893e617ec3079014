/* SPDX-License-Identifier: Apache-2.0 */
/* engine_load: what an engine says of how busy it is (session.report). Believed as told,
 * for ENGINE_LOAD_NS: one that hangs, or has gone to sleep, says nothing. */
#ifndef KVD_CLUSTER_ENGINE_LOAD_H
#define KVD_CLUSTER_ENGINE_LOAD_H

#include <stdint.h>

/* X(member, "help"): all are counts or counts a second; ENGINE_LOAD_UNKNOWN: not said */
#define ENGINE_LOADS(X)                                                     \
	X(running, "requests that it computes")                             \
	X(waiting, "requests that wait for it")                             \
	X(kv_free_tokens, "tokens for which its cache has room")            \
	X(kv_total_tokens, "tokens that its cache holds")                   \
	X(prompt_tokens_waiting, "tokens of prompts that it is to compute") \
	X(prompt_tokens_s, "tokens of prompts it computes a second, busy")  \
	X(decode_tokens_s, "tokens it generates a second, all requests together")

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
