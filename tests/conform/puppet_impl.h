/* SPDX-License-Identifier: Apache-2.0 */
/* puppet_impl: what puppet.c (objects, callbacks) and puppet_cmd.c (commands)
 * share. */
#ifndef TESTS_CONFORM_PUPPET_IMPL_H
#define TESTS_CONFORM_PUPPET_IMPL_H

#include "daemon/loop/loop.h"
#include "daemon/loop/offload.h"
#include "tests/conform/puppet.h"

struct puppet_peer {
	struct puppet *puppet;
	struct xp_peer *peer; /* NULL: not open */
	bool ready, closing, closed;
	unsigned int lost;
	struct err why;
};

struct puppet_mem {
	struct memory *memory; /* the region's reference */
	struct xp_reg *reg;
	bool reffed;
	/* mem_reg and mem_dereg are for helper threads */
	struct offload_job job;
	struct puppet *puppet;
	bool dereg; /* what the job does */
};

struct puppet_key {
	struct xp_key *key;
	unsigned int state; /* as CMD_KEY_STATE */
	struct err why;
};

struct puppet_sides {
	struct xp_sides sides;
	struct xp_buffer *buffers;
	uint32_t hash_mem, poison_mem;
};

struct puppet_op {
	struct puppet *puppet;
	struct xp_op op;
	struct puppet_sides *sides;
	uint8_t *header;
	uint32_t peer;
	bool posted;
	unsigned int dones, firsts;
	uint64_t hash;
};

struct puppet_in {
	struct xp_inbound *in; /* NULL once done */
	struct puppet_sides *sides;
	uint32_t peer, sequence, sides_there;
	enum xp_kind kind;
	size_t header_len;
	bool header_ok;
	uint64_t bytes, moved, hash;
	bool answered;
	unsigned int dones, firsts;
	bool failed;
	struct err err;
};

struct puppet {
	struct xp_env env;
	struct transport *transport;
	struct loop_prepare prepare;
	enum puppet_policy policy;
	const char *inside;	  /* the contract's call that is running */
	unsigned int broken;	  /* promises */
	char words[ERR_TEXT_MAX]; /* of the first one */
	bool ending;
	struct puppet_peer peers[PUPPET_PEERS];
	struct puppet_mem mems[PUPPET_MEMS];
	struct puppet_key keys[PUPPET_KEYS];
	struct plan *plans[PUPPET_PLANS];
	struct puppet_sides sides[PUPPET_SIDES];
	struct puppet_op *ops[PUPPET_OPS];
	struct puppet_in ins[PUPPET_INS];
	uint32_t in_count;
	uint64_t fail_alloc;	      /* the n-th allocation from the next post on */
	uint64_t fail_reg, reg_count; /* the n-th of mem_reg; how many it made */
	uint8_t answer[4096];	      /* a reply's blob */
};

/* A promise of transport.h was broken. */
void puppet_broken(struct puppet *puppet, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));
void puppet_land(struct puppet *puppet, struct puppet_in *in, uint32_t sides);
void puppet_peer_closed(void *arg);
void puppet_on_op_done(struct xp_op *op);
void puppet_on_op_first(struct xp_op *op, uint64_t at_ns);
struct puppet_in *puppet_in_of(struct puppet *puppet, const struct xp_inbound *in);
extern const struct xp_callbacks puppet_callbacks;
void puppet_end_step(struct puppet *puppet);
/* Register or deregister on a helper thread; done when !job.submitted. */
void puppet_mem_job(struct puppet_mem *entry, bool dereg);
void puppet_sides_clear(struct puppet_sides *sides);

#endif
