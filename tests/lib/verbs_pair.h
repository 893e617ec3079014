/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs_pair: two verbs transports in this process, on one loop, joined by the
 * adapters of fake_verbs. Node a dials and posts, node b answers. Devices are
 * mlx5_0 and mlx5_1 at a (10.9.0.1, 10.9.1.1), mlx5_2 and mlx5_3 at b.
 */
#ifndef KVD_TESTS_LIB_VERBS_PAIR_H
#define KVD_TESTS_LIB_VERBS_PAIR_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/loop/loop.h"
#include "daemon/transport/verbs/verbs_impl.h"
#include "tests/lib/fake_verbs.h"

#define VP_KIB (UINT64_C(1) << 10)
#define VP_MIB (UINT64_C(1) << 20)
#define VP_WAIT_NS (20 * LOOP_NS_PER_S)

enum vp_answer { VP_LAND, VP_HOLD, VP_REFUSE };

struct vp_node {
	struct transport *xp;
	struct xp_peer *peer;
	bool ready, closed;
	unsigned int lost;
	struct err why;
	enum vp_answer answer;
	struct xp_sides sides; /* for VP_LAND */
	struct xp_inbound *in; /* the last request that is not done */
	unsigned int requests, dones, failures;
	struct err done_err;
	struct xp_used used; /* of the last request that was done */
};

struct vp_place {
	struct memory *memory;
	uint8_t *view; /* its bytes, as its owner sees them */
	struct xp_reg *reg;
	struct xp_key *key; /* at the other node */
	struct xp_buffer local, remote;
};

struct vp_transfer {
	enum xp_kind kind;
	struct plan *plan;
	struct vp_node *src_node, *dst_node;
	struct vp_place src, dst;
	struct xp_op op;
	unsigned int done;
};

extern struct vp_node vp_a, vp_b;
extern struct loop *vp_loop;
extern struct offload *vp_offload;
extern struct gpu *vp_gpu;	/* what transports get; NULL */
extern struct config vp_config; /* what vp_open() takes; vp_begin() presets it */

int vp_begin(void **state);	      /* adapters; nothing is open */
int vp_begin_pair(void **state);      /* joined, with a rail each */
int vp_begin_two_rails(void **state); /* joined, with two */
/* Joined, with a rail each and what a work request costs at a and at b. */
int vp_begin_packing(void **state, uint32_t ns_a, uint32_t ns_b);
int vp_end(void **state); /* closes what is open; nothing may be left */
int vp_open(struct vp_node *node, const char *rails); /* the transport's word */
void vp_connect(struct vp_node *node, const struct vp_node *to, uint8_t in, uint8_t out);
void vp_join(void);
void vp_close_peer(struct vp_node *node);
void vp_close_begin(struct vp_node *node); /* node->closed tells the end */
bool vp_turn(void);
void vp_turns(void); /* for fake_verbs_knock() */
void vp_spin_ms(uint64_t ms);
struct verbs_peer *vp_peer(const struct vp_node *node);
struct verbs_transport *vp_transport(const struct vp_node *node);

#define VP_AWAIT(condition)                                          \
	do {                                                         \
		uint64_t end_ = loop_clock_ns(vp_loop) + VP_WAIT_NS; \
		while (!(condition)) {                               \
			if (loop_clock_ns(vp_loop) > end_)           \
				fail_msg("never: %s", #condition);   \
			vp_turn();                                   \
		}                                                    \
	} while (0)

struct plan *vp_plan(const struct plan_run *runs, size_t count);
void vp_place_init(struct vp_place *place, struct vp_node *node, uint64_t bytes);
/* Of memory that is there already; takes the reference. */
void vp_place_of(struct vp_place *place, struct vp_node *node, struct memory *memory);
void vp_place_fini(struct vp_place *place);
/* a WRITEs to b, or READs from it; both memories have `bytes`. */
void vp_transfer_init(struct vp_transfer *x, enum xp_kind kind,
		      const struct plan_run *runs, size_t count, uint64_t bytes);
void vp_transfer_fini(struct vp_transfer *x);
/* Of memories that are there; takes the references. */
void vp_transfer_with(struct vp_transfer *x, enum xp_kind kind,
		      const struct plan_run *runs, size_t count,
		      const struct vp_place *src, const struct vp_place *dst);
int vp_post(struct vp_transfer *x);
void vp_moved(struct vp_transfer *x); /* it succeeded, every byte in its place */
/* What both sides say that it used; no other one came after it. */
void vp_says(const struct vp_transfer *x, bool staged, uint64_t requests_a,
	     uint64_t requests_b);
void vp_failed(struct vp_transfer *x, enum err_code code, const char *words);
/* The destination is given to somebody else: nothing of it may change. */
void vp_still(struct vp_transfer *x);

#endif
