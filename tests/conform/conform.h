/* SPDX-License-Identifier: Apache-2.0 */
/*
 * conform: what a case of the suite is written with.
 *
 * A world holds two or three ends (puppets) whose transports are connected: A
 * with B, A with C; or one end that is its own peer. Areas are engine memory at
 * an end, with an image of what must be in it; a deal is one transfer between
 * two ends, known to both. A case makes areas and deals, lets them run, and
 * says what must come out. The runner adds to each case: all transfers are
 * settled, no promise was broken, every byte of every area is what its image
 * says (so guard bytes are checked always), and what was torn stays as it was
 * in the done callback for one more second.
 */
#ifndef TESTS_CONFORM_CONFORM_H
#define TESTS_CONFORM_CONFORM_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/base/list.h"
#include "daemon/loop/loop.h"
#include "daemon/transport/transport.h"
#include "tests/conform/puppet.h"
#include "tests/conform/store.h"
#include "tests/lib/gpu_owner.h"

struct fake_hub;
struct world;

#define ENDS_MAX 3u
#define MS LOOP_NS_PER_MS
extern uint64_t wait_ns; /* for what must come: $KVD_CONFORM_WAIT_S, or 20 s */
#define STILL_NS LOOP_NS_PER_S
#define HEADER_BYTES 64u

/* How a backend is brought up for the suite. */
struct backend {
	const char *name;		   /* "shm"; "fake-check" */
	const char *transport;		   /* name of the transport_ops */
	bool is_virtual;		   /* one process, one virtual loop */
	void (*tune)(struct world *world); /* fake profiles */
	/* A connection to the end's door that speaks no protocol yet, or -1:
	 * hostile input can be sent without the backend's help. NULL: none. */
	int (*raw_connect)(const void *address, size_t len);
	const char *raw_missing; /* why raw_connect is NULL */
	/* Sealed memory is device memory instead, of the fake driver. */
	bool gpu;
	const char *crypto; /* tcp_crypto; NULL: its preset */
};
/* The n-th one, or NULL: the fake's variants, then all of transport_table. */
const struct backend *backend_at(size_t n);
const struct transport_ops *backend_ops(const struct backend *backend);

struct slots {
	bool used[PUPPET_OPS];
	uint32_t hint;
};

struct end {
	struct world *world;
	uint32_t index; /* also its peer slot at the other ends */
	bool alive;
	struct puppet *puppet; /* lives in this process; NULL: remote */
	int sock;	       /* of a remote one: to it, or to its keeper */
	pid_t pid;
	bool far;	   /* on another machine, with a keeper */
	unsigned int owed; /* replies of end_post() under way */
	struct slots mems, keys, plans, sides, ops;
	uint8_t address[XP_ADDRESS_MAX];
	size_t address_len;
	uint32_t caps;
};

struct world {
	const struct backend *backend;
	bool self; /* end[0] and end[1] are one */
	struct xp_env env;
	struct fake_hub *hub;
	struct end *end[ENDS_MAX]; /* NULL: not there */
	struct end store[ENDS_MAX];
	uint8_t tokens[ENDS_MAX][ENDS_MAX][XP_TOKEN_BYTES]; /* [from][to] */
	struct list areas, deals, stills;
	uint32_t sequence;
	uint64_t seed;
	uint64_t big_bytes; /* enough to be caught in flight, as a start */
	bool spent;	    /* an end is gone: make a new world */
	bool failed;	    /* a case left it in an unknown state */
};

/* ---- failing and skipping: leave the case at once ---- */
void case_fail(const char *file, int line, const char *fmt, ...)
	__attribute__((format(printf, 3, 4), noreturn));
void case_skip(const char *fmt, ...) __attribute__((format(printf, 1, 2), noreturn));
#define FAIL(...) case_fail(__FILE__, __LINE__, __VA_ARGS__)
#define CHECK(cond, ...)                                            \
	do {                                                        \
		if (!(cond))                                        \
			case_fail(__FILE__, __LINE__, __VA_ARGS__); \
	} while (0)

/* ---- time ---- */
uint64_t world_now_ns(const struct world *world);
void world_step(struct world *world, uint64_t max_ns);
void world_run_ns(struct world *world, uint64_t ns);
#define AWAIT_NS(world, limit_ns, cond)                                   \
	({                                                                \
		uint64_t end_ns_ = world_now_ns(world) + (limit_ns);      \
		bool met_;                                                \
		while (!(met_ = (cond)) && world_now_ns(world) < end_ns_) \
			world_step(world, MS / 4);                        \
		met_;                                                     \
	})
#define AWAIT(world, cond) AWAIT_NS(world, wait_ns, cond)

/* ---- worlds ---- */
/* With KVD_CONFORM_FAR=ADDRESS:PORT, B and C live with the keeper there. */
int world_new(const struct backend *backend, bool self, uint64_t seed,
	      struct world **world_p);
/* Tears down in order; false when an end ended badly (leak, crash, hang). */
bool world_free(struct world *world);
/* Kill the other processes and leave the rest: nothing in it can be trusted. */
void world_abandon(struct world *world);
uint64_t world_random(struct world *world, uint64_t below);
/* Everything has had its done, at all living ends. */
bool world_settled(struct world *world);
void world_settle(struct world *world);
/* kill -9 of the end's process (the fake: its node vanishes). */
void world_kill(struct world *world, struct end *end);
void world_connect(struct world *world, struct end *a, struct end *b);

/* ---- ends ---- */
/* A command; a dead end fails the case. Up to four arguments. */
struct reply end_call(struct end *end, enum cmd_type type, uint64_t a0, uint64_t a1,
		      uint64_t a2, uint64_t a3);
struct reply end_call_full(struct end *end, const struct cmd *cmd, const void *blob,
			   int fd, const void **reply_blob_p, int *reply_fd_p);
/* A command whose reply says nothing, and that no other end's must follow: a far end
 * is not waited for. */
void end_post(struct end *end, const struct cmd *cmd, const void *blob);
/* A command for a far end's keeper; also when the end is dead. */
struct reply end_keep(struct end *end, const struct cmd *cmd, const void *blob,
		      const void **reply_blob_p);
void end_signal(struct end *end, int number); /* its process */
uint32_t slot_take(struct slots *slots, uint32_t max);
struct peer_state {
	bool ready, closed, open;
	unsigned int lost;
	enum err_code code;
	char text[ERR_TEXT_MAX];
};
struct peer_state end_peer(struct end *end, const struct end *other);
int end_peer_open(struct end *end, const struct end *other, bool dial,
		  const uint8_t *token_in, const uint8_t *token_out, struct err *err_p);
void end_peer_close(struct end *end, const struct end *other); /* waits, clears */
void end_policy(struct end *end, enum puppet_policy policy);
uint64_t end_requests(struct end *end);
bool end_settled(struct end *end);

/* ---- areas ---- */
struct area {
	struct list link;
	struct world *world;
	struct end *at;
	uint32_t slot;
	enum memory_kind kind;
	uint64_t length;
	struct store store;   /* of a near end; a device's fd */
	struct gpu_owner gpu; /* device */
	uint8_t *image;
	uint32_t keys[ENDS_MAX]; /* slots at the others, PUPPET_NONE */
	bool unchecked;		 /* its memory is gone: nothing to compare */
	bool unreffed, deregged;
	bool is_still; /* in the list of those */
};

/* Filled with a pattern, imported and registered. A refusal by the backend
 * skips the case with its words when the kind is not SEALED. */
struct area *area_new(struct world *world, struct end *at, enum memory_kind kind,
		      uint64_t length);
/* What is in it now; false: its memory is gone. */
bool area_read(const struct area *area, uint64_t offset, void *buf, size_t len);
/* AREA_SAMPLE bytes at each offset. */
#define AREA_SAMPLE 8u
bool area_samples(const struct area *area, const uint64_t *offsets, unsigned int count,
		  uint8_t (*out)[AREA_SAMPLE]);
void area_write(struct area *area, uint64_t offset, const void *buf, size_t len);
void area_verify(struct area *area); /* memory == image */
void area_resync(struct area *area); /* image = memory */
uint64_t area_hash(const struct area *area);
/* The key of the area at the other end, made when first asked for. */
uint32_t area_key(struct area *area, struct end *other);
void area_key_drop(struct area *area, struct end *other);
void area_unref(struct area *area);		   /* the region's reference */
void area_dereg(struct area *area);		   /* waits */
void area_cut(struct area *area, uint64_t length); /* ftruncate of guarded memory */
void area_owner_kill(struct area *area);
/* Gone at the end and here. */
void area_free(struct area *area);
/* What a try that showed nothing leaves behind: freed, unless it has to be still. */
void area_leave(struct area *area);
/* The memory must be exactly this (a hash from a done callback) in a second. */
void area_still(struct area *area, uint64_t hash);
/* Verify the ones that are due, all when `wait`. Returns how many have moved. */
unsigned int stills_check(struct world *world, bool wait);

/* ---- deals ---- */
struct place {
	struct area *area;
	uint64_t offset, length; /* of the plan's buffer in the area */
};

struct deal {
	struct list link;
	struct world *world;
	enum xp_kind kind;
	struct end *src, *dst, *init, *ans;
	struct place *src_places, *dst_places;
	uint32_t src_count, dst_count;
	struct plan_run *runs;
	size_t run_count;
	uint64_t bytes, rows;
	uint32_t src_plan, dst_plan; /* slots at src and dst */
	uint32_t src_sides, dst_sides;
	uint32_t op, sequence;
	size_t header_len;
	bool posted;
	bool poison;	    /* the source's memory is overwritten in its done callback */
	struct err refused; /* post()'s */
	/* deal_torn(): how much of the destination was written */
	uint64_t written;
};

struct deal *deal_new(struct world *world, enum xp_kind kind, struct end *src,
		      struct end *dst, const struct place *src_places, uint32_t src_count,
		      const struct place *dst_places, uint32_t dst_count,
		      const struct plan_run *runs, size_t run_count);
/* One area each, whole. */
struct deal *deal_simple(struct world *world, enum xp_kind kind, struct area *src,
			 struct area *dst, const struct plan_run *runs, size_t run_count);
/* A WRITE without bytes. */
struct deal *deal_message(struct world *world, struct end *from, struct end *to);
/* Another plan on the answerer's side than on the initiator's. */
void deal_answer_with(struct deal *deal, const struct plan_run *runs, size_t run_count);
int deal_post(struct deal *deal, size_t header_len);
bool deal_asked(struct deal *deal); /* the request is there */
void deal_land(struct deal *deal);
void deal_refuse(struct deal *deal, enum err_code code, const char *words);
void deal_revoke(struct deal *deal, enum err_code code, const char *words);
void deal_cancel(struct deal *deal, enum err_code code);

struct outcome {
	bool there;	    /* posted; or the request has come */
	unsigned int dones; /* 1 when done */
	enum err_code code; /* 0: success */
	uint64_t moved, bytes, hash;
	size_t header_len;
	bool header_ok;
	enum xp_kind kind;
	char text[ERR_TEXT_MAX];
};
struct outcome deal_op(struct deal *deal);
struct outcome deal_in(struct deal *deal);
/* Some, but not all of the destination is written right now. */
bool deal_flying(struct deal *deal);
/* Both ends say success: move the images along. */
void deal_succeeded(struct deal *deal);
/* It did not: every byte is old or new, nothing else; deal->written counts the
 * new ones; the image becomes what is there. Also fine for one that did. */
void deal_torn(struct deal *deal);
void deal_free(struct deal *deal); /* done, or never posted */
/* Post, answer at once, settle, succeed. */
void deal_run(struct deal *deal);

/* ---- cases ---- */
enum {
	NEED_TWO = 1 << 0,     /* two daemons: a self peer cannot */
	NEED_THREE = 1 << 1,   /* A, B and C */
	NEED_PROCESS = 1 << 2, /* a process of its own that can be stopped */
	NEED_FAKE = 1 << 3,    /* scripted faults */
	NEED_RAW = 1 << 4,     /* backend.raw_connect */
	HEAVY = 1 << 5,	       /* much work: not run again for each planted bug */
	BY_ADDRESS = 1 << 6,   /* finds an end by its address: run with other boot ids */
};
struct conform_case {
	const char *name;
	void (*run)(struct world *world);
	unsigned int needs;
};
extern const struct conform_case cases_data[], cases_order[], cases_memory[],
	cases_abort[], cases_loss[], cases_hostile[], cases_alloc[], cases_fake[];

#endif
