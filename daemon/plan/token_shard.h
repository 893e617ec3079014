/* SPDX-License-Identifier: Apache-2.0 */
/*
 * token_shard: the tokens of a request that a view holds where context parallelism
 * divides them over ranks.
 *
 * Token t is held when (t / run) % size == rank, and follows the tokens held before it: a
 * page list has no gaps. The list's first token is a multiple of size * run, so that the
 * rule is the same counted from it or from the start of the request.
 */
#ifndef KVD_PLAN_TOKEN_SHARD_H
#define KVD_PLAN_TOKEN_SHARD_H

#include <stdbool.h>
#include <stdint.h>

#define TOKEN_SHARD_SIZE_MAX 256u
#define TOKEN_SHARD_RUN_MAX (1u << 20) /* tokens */

/* All zero: all tokens. Otherwise size is 2 or more. */
struct token_shard {
	uint32_t size, rank, run;
};

static inline bool token_shard_is_all(const struct token_shard *shard)
{
	return shard->size == 0;
}

/* Tokens of one round over all ranks; a list starts at a multiple of it. */
static inline uint64_t token_shard_turn(const struct token_shard *shard)
{
	return token_shard_is_all(shard) ? 1 : (uint64_t)shard->size * shard->run;
}

/* The number of held tokens before `token`: its position if it is held. */
uint64_t token_shard_slot(const struct token_shard *shard, uint64_t token);
/* The token at a position. False: beyond 2^64. */
bool token_shard_at(const struct token_shard *shard, uint64_t slot, uint64_t *token_p);
/* The tokens [begin, *end_p) are held (outcome true) or not; *end_p > begin. */
bool token_shard_run(const struct token_shard *shard, uint64_t begin, uint64_t *end_p);
/* The number of tokens of [begin, end) that both hold. The run of one is a multiple of
 * the other's. */
uint64_t token_shard_common(const struct token_shard *a, const struct token_shard *b,
			    uint64_t begin, uint64_t end);
/* Is there a token that both hold? */
bool token_shard_meet(const struct token_shard *a, const struct token_shard *b);
/* Each run lies within one of the other's, or holds whole ones of them. */
bool token_shard_nests(const struct token_shard *a, const struct token_shard *b);

#endif
