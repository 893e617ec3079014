/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shm_duo: two shm transports in one process and on one loop, for tests of the
 * backend. Node `a` dials and posts, node `b` answers as `answer` says. Every
 * callback checks what transport.h promises of it: once, never from inside a
 * call, nothing open when a peer is lost.
 */
#ifndef KVD_TESTS_LIB_SHM_DUO_H
#define KVD_TESTS_LIB_SHM_DUO_H

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/transport/shm/shm_private.h"

#define DUO_KIB (UINT64_C(1) << 10)
#define DUO_MIB (UINT64_C(1) << 20)
#define DUO_WAIT_NS (20 * LOOP_NS_PER_S)
#define DUO_REQUESTS_MAX 8192u
#define DUO_TOKEN_A "token of a ....."
#define DUO_TOKEN_B "token of b ....."

enum duo_answer { DUO_LAND, DUO_HOLD, DUO_REFUSE };

struct duo_node {
	struct duo *test;
	struct transport *xp;
	struct xp_peer *peer;
	unsigned int ready, lost, closed, keys_ok, keys_bad;
	struct err why, key_err;
	enum duo_answer answer;
	uint64_t slow_ns;      /* that a request takes */
	struct xp_sides sides; /* what DUO_LAND answers */
	unsigned int requests;
	struct {
		struct xp_inbound *in; /* NULL when done */
		enum xp_kind kind;
		uint32_t mark; /* the header's first bytes */
		unsigned int done;
		struct err err;
	} seen[DUO_REQUESTS_MAX];
	unsigned int inbound_dones;
};

struct duo {
	struct loop *loop;
	struct gates *gates;
	struct offload *offload;
	struct copier *copier;
	struct config config;
	struct duo_node a, b; /* a dials */
	bool in_call;	      /* inside post, land, cancel: no callback may come */
};

extern struct gpu *duo_gpu; /* of both nodes; NULL: they use none */

struct duo_op {
	struct xp_op op;
	struct duo *test;
	unsigned int calls;
};

struct duo_shared {
	struct memory *memory;
	struct xp_reg *reg;
	struct xp_key *key;
	uint8_t *heap; /* vm: the memory behind */
};

struct duo_transfer {
	struct duo *t;
	struct duo_shared src, dst;
	struct plan *plan;
	uint64_t bytes; /* of each memory */
	struct xp_buffer local, remote_src, remote_dst, here;
	struct duo_op top;
	enum xp_kind kind;
};

#define DUO_WAIT(t, condition)                                                 \
	do {                                                                   \
		uint64_t end_ = loop_clock_ns((t)->loop) + DUO_WAIT_NS;        \
		while (!(condition)) {                                         \
			if (loop_clock_ns((t)->loop) > end_)                   \
				fail_msg("waited in vain for %s", #condition); \
			loop_turn((t)->loop, 20 * LOOP_NS_PER_MS);             \
		}                                                              \
	} while (0)

void duo_on_closed(void *arg);
void duo_on_op_done(struct xp_op *op);
int duo_peer_open(struct duo_node *n, const struct transport *remote, bool dial,
		  const char *in, const char *out);
/* Transfers that overlap themselves or each other want one copy thread: two
 * would write the same bytes at once, as an engine may ask for, but no test. */
struct duo *duo_new_threads(unsigned int threads);
struct duo *duo_new(void);
/* ... with a peer opened on either side, and ready. */
struct duo *duo_pair_threads(unsigned int threads);
struct duo *duo_pair(void);
/* Closes all, and checks that each request had exactly one end. */
void duo_end(struct duo *t);
struct xp_key *duo_key_of(struct duo_node *of, struct xp_reg *reg, struct duo_node *at);
/* Memory registered at `of`; where `at` is given, with the key it has of it. */
void duo_shared_new(struct duo_shared *s, struct duo_node *of, struct duo_node *at,
		    uint64_t bytes, bool vm);
void duo_shared_free(struct duo_shared *s);
uint8_t *duo_shared_bytes(struct duo_shared *s);
struct plan *duo_plan_rows(uint64_t rows, uint64_t len);
/* Rows between two memories: a posts, b answers: WRITE a -> b, READ b -> a. */
void duo_transfer_init(struct duo_transfer *x, struct duo *t, enum xp_kind kind,
		       uint64_t rows, uint64_t len, bool src_vm, bool dst_vm);
/* Copies the same bytes over and over: what must happen before its end does,
 * however slow the machine is. */
void duo_transfer_init_endless(struct duo_transfer *x, struct duo *t, enum xp_kind kind,
			       bool vm);
/* Bytes have landed, and go on landing. */
bool duo_in_flight(struct duo_transfer *x);
int duo_post(struct duo_transfer *x);
void duo_cancel(struct duo_transfer *x);
void duo_transfer_check(struct duo_transfer *x);
bool duo_dst_is_zero(struct duo_transfer *x);
void duo_transfer_fini(struct duo_transfer *x);
void duo_assert_done(struct duo_transfer *x, enum err_code code);

#endif
