/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transport_pair: two transports in this process, on one loop, with real sockets on lo;
 * for the tests of tcp and ucx. Globals, as a test program has one pair at a time.
 */
#ifndef KVD_TESTS_LIB_TRANSPORT_PAIR_H
#define KVD_TESTS_LIB_TRANSPORT_PAIR_H

#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "daemon/config/config.h"
#include "daemon/loop/loop.h"
#include "daemon/transport/transport.h"

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define UP_WAIT_NS (20 * LOOP_NS_PER_S)
#define UP_INBOUNDS 2048u

enum up_answer { ANSWER_LAND, ANSWER_REFUSE, ANSWER_HOLD };

struct up_node {
	struct transport *t;
	struct xp_peer *peer;
	bool ready, lost, closed;
	struct err lost_why;
	enum up_answer answer;
	struct xp_sides sides; /* for ANSWER_LAND */
	struct xp_inbound *held;
	unsigned int requests, dones, failures;
	uint64_t order[UP_INBOUNDS]; /* first 8 bytes of the headers, as they came */
	struct err done_err;
};

struct up_op {
	struct xp_op op;
	unsigned int done;
};

struct up_place {
	struct memory *memory;
	struct xp_reg *reg;
	struct xp_buffer buffer;
};

/* A transfer of 64 MiB in one piece, or of 8192 rows of 4 KiB. */
struct up_big {
	struct plan *plan;
	struct up_place src, dst;
	struct up_op op;
	struct up_node *src_node, *dst_node;
};

extern const struct transport_ops *up_transport; /* main() sets it */
extern struct up_node up_a, up_b;		 /* a asks, b answers */
extern struct loop *up_loop;
extern struct config up_config;

/* Setup and teardown: two transports; and two that are connected. */
int up_begin(void **state);
int up_begin_pair(void **state);
int up_end(void **state);

void up_open(struct up_node *n);
void up_connect(struct up_node *n, const struct up_node *to, uint8_t in, uint8_t out);
void up_join(void); /* connect both, wait until ready */
void up_close(struct up_node *n);
void up_rejoin(void); /* close both, join again */

bool up_turn(void);
void up_spin_ms(uint64_t ms);
#define await(condition)                                             \
	do {                                                         \
		uint64_t end_ = loop_clock_ns(up_loop) + UP_WAIT_NS; \
		while (!(condition)) {                               \
			if (loop_clock_ns(up_loop) > end_)           \
				fail_msg("never: %s", #condition);   \
			up_turn();                                   \
		}                                                    \
	} while (0)

void up_place_init(struct up_place *p, struct up_node *n, uint64_t bytes, bool guarded);
void up_place_fini(struct up_place *p, struct up_node *n);
void up_fill(struct up_place *p, uint64_t seed);
struct plan *up_plan(const struct plan_run *runs, size_t count);
void up_op_init(struct up_op *op, enum xp_kind kind, const struct plan *plan,
		struct up_place *src, struct up_place *dst);

/* Plans of many shapes, moved between a and b, every byte checked. */
void up_every_shape(enum xp_kind kind, bool guarded_src, bool guarded_dst);
/* 10 000 rows of 256 bytes inside 8 MiB. */
extern const struct plan_run up_short_rows;

void up_big_start(struct up_big *big, enum xp_kind kind, bool rows);
/* Over: whatever the other side and libucp still do must not show in memory. */
void up_assert_still(struct up_big *big);
void up_big_end(struct up_big *big);

void up_assert_refused(int r, enum err_code code, const char *words);

#endif
