/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake: a transport for tests. Several transports inside one process, joined
 * by a hub, move bytes slice by slice through memory.h mappings on a loop's
 * clock; the hub scripts delays, reordering and faults from a seed.
 *
 * It keeps every promise of transport.h except where a fault or a planted bug
 * says otherwise. Between revoke() or cancel() and the done callback slices
 * that were under way go on landing (as a NIC's would), so a caller that calls
 * a room still too early is caught by looking at memory.
 *
 *   fake_hub_new(loop, seed, &hub);            // before any transport opens
 *   fake_ops.open(&env, &callbacks, &a);       // env.loop finds the hub
 *   fake_ops.open(&env, &callbacks, &b);
 *   fake_hub_profile(hub)->delay_max_ns = 5 * LOOP_NS_PER_MS;
 *   fake_script(hub, &(struct fake_rule){.fault = FAKE_STUCK, .from = a,
 *                                        .at_bytes = 4096, .times = 1});
 *
 * All calls are for the loop's thread, as the contract says; mem_reg and
 * mem_dereg may come from helper threads. The hub outlives its transports. A
 * hub never draws from the loop's random numbers, so the same seed gives the
 * same schedule whatever the daemons above draw; fake_digest() compares runs.
 */
#ifndef KVD_TRANSPORT_FAKE_H
#define KVD_TRANSPORT_FAKE_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/transport/transport.h"

struct fake_hub;

extern const struct transport_ops fake_ops; /* name "fake", XP_CAP_SELF */

/* How bytes and messages of one direction between two nodes behave. Times are
 * drawn evenly from [min, max]; chances are per mille of the posted transfers. */
struct fake_profile {
	uint64_t delay_min_ns, delay_max_ns; /* of each message and slice */
	uint64_t done_max_ns;	 /* a done callback, and letting go of memory when
				    the peer is lost, come so much later at most */
	uint64_t connect_ns;	 /* dial -> ready */
	uint64_t connect_try_ns; /* a dial without an answer fails after this */
	uint64_t detect_ns;	 /* a node vanished -> its peers are told */
	uint64_t key_ns;	 /* key_unpack -> on_key; 0: usable at once */
	uint64_t slice_ns;	 /* the reader's pace, per slice */
	uint32_t slice_bytes;
	uint32_t window; /* slices of a transfer under way, at most FAKE_WINDOW_MAX */
	/* messages of different transfers may overtake each other; requests of a
	 * peer never do */
	bool reorder;
	/* READ: the destination reads the source's memory through its key, then
	 * asks with XP_CHECK; else the source serves */
	bool check;
	/* post and land fail with ERR_INVAL when a key of the remote side is
	 * missing or not ready, as backends do that copy at the destination */
	bool need_keys;
	/* slices that are under way at a stop are thrown away (tcp, ucx) instead
	 * of landing before the done callback (a NIC) */
	bool discard;
	/* random faults, per mille of posts */
	unsigned int refuse_pm, nomem_pm, error_pm, stuck_pm, slow_pm, late_pm, cut_pm;
};
#define FAKE_WINDOW_MAX 64u

enum fake_fault {
	FAKE_REFUSE = 1,  /* post() fails with ERR_TRANSPORT, nothing happened */
	FAKE_NOMEM,	  /* post() fails with ERR_NOMEM */
	FAKE_NOMEM_THERE, /* the other side has no memory for the request: refused
			     with ERR_NOMEM, on_request() never comes */
	FAKE_NOMEM_REG,	  /* mem_reg() fails with ERR_NOMEM (`from`'s) */
	FAKE_NOMEM_KEY,	  /* key_unpack() fails with ERR_NOMEM (`from`'s) */
	FAKE_ERROR,	  /* after at_bytes the transfer fails with ERR_TRANSPORT */
	FAKE_STUCK,	  /* after at_bytes nothing moves until cancel, revoke, close */
	FAKE_SLOW,	  /* slices take slice_ns * factor */
	FAKE_LATE,	  /* the slice at at_bytes is extra_ns longer under way */
	FAKE_CUT,	  /* after at_bytes the connection breaks */
	FAKE_VANISH_FROM, /* after at_bytes the initiator's node dies */
	FAKE_VANISH_TO,	  /* after at_bytes the answerer's node dies */
};

/* Applies to posts `from` -> `to` (NULL: any) that match, after the first
 * `skip` of them, `times` times (0: always). Rules are tried in order; the
 * first that applies wins over the profile's chances. */
struct fake_rule {
	enum fake_fault fault;
	const struct transport *from, *to;
	unsigned int kinds; /* 1 << XP_WRITE | 1 << XP_READ; 0: any */
	unsigned int skip, times;
	uint64_t at_bytes;
	uint64_t extra_ns;   /* FAKE_LATE; 0: 200 ms */
	unsigned int factor; /* FAKE_SLOW; 0: 100 */
};

/* Broken promises, for tests of tests: exactly one at a time. */
enum fake_bug {
	FAKE_BUG_NONE,
	FAKE_BUG_SLICE_AFTER_DONE, /* a stopped transfer writes once more, later */
	FAKE_BUG_REVOKE_IGNORED,   /* done at once, all slices still land */
	FAKE_BUG_LOST_WRITES,	   /* slices under way land after on_peer_lost */
	FAKE_BUG_DONE_SHORT,	   /* success without the last slice */
	FAKE_BUG_REQUESTS_SWAPPED, /* two requests change places */
	FAKE_BUG_BYTE_FLIPPED,	   /* one bit of a slice */
	FAKE_BUG_BYTE_STRAY,	   /* one byte past a row's end */
	FAKE_BUG_SOURCE_STALE,	   /* the source is read after its side is done */
	FAKE_BUG_WORDS_LOST,	   /* the initiator does not get the refuser's words */
	FAKE_BUG_TOKEN_UNCHECKED,  /* any token connects */
	FAKE_BUG_COUNT,
};

struct fake_stats {
	uint64_t posts, refused_posts, requests, slices, landed_bytes;
	uint64_t discarded; /* slices that came too late and were thrown away */
	uint64_t faults;    /* scripted or drawn */
	uint64_t fault_ns;  /* when the last one was */
	uint64_t lost;	    /* on_peer_lost calls */
};

/* One hub a loop (looked up by env.loop, in this thread). */
int fake_hub_new(struct loop *loop, uint64_t seed, struct fake_hub **hub_p);
/* All transports are closed by then. NULL is fine. */
void fake_hub_free(struct fake_hub *hub);

/* The profile of all pairs without one of their own; change it any time. */
struct fake_profile *fake_hub_profile(struct fake_hub *hub);
/* Own profile of the direction from -> to, starting as a copy of the default;
 * NULL with ERR_NOMEM. Gone when one of the two closes. */
struct fake_profile *fake_pair_profile(struct fake_hub *hub, const struct transport *from,
				       const struct transport *to);
/* The n-th transport that was opened on this hub and is still open, or NULL. */
struct transport *fake_hub_node(struct fake_hub *hub, unsigned int n);

int fake_script(struct fake_hub *hub, const struct fake_rule *rule); /* ERR_NOMEM */
/* Posts whose header begins with this byte are the line's own messages: no rule counts
 * them, and of the chances only those of the line meet them (refuse, nomem, cut). What
 * has no bytes cannot be stuck while its line works. */
void fake_hub_spare(struct fake_hub *hub, uint8_t first);
void fake_script_clear(struct fake_hub *hub);
void fake_plant(struct fake_hub *hub, enum fake_bug bug);
const char *fake_bug_name(enum fake_bug bug); /* "slice-after-done"… */

/* kill -9 of the node's daemon: from now on it neither sends, receives nor
 * writes, and gets no callback but the dones and on_closed of its own
 * peer_close(), so that the caller can tear it down. Its peers learn of it
 * after detect_ns. */
void fake_node_vanish(struct transport *transport);
/* SIGSTOP / SIGCONT: nothing happens at the node; what arrives waits. */
void fake_node_freeze(struct transport *transport, bool frozen);
/* Break the connections between two nodes; both are told, each after a delay. */
void fake_link_cut(struct transport *a, struct transport *b);
/* While down, nothing passes between the two and nobody is told; what was sent
 * comes when it is up again. */
void fake_link_down(struct transport *a, struct transport *b, bool down);

/* Nothing is under way: no message, no slice, no unfinished transfer. */
bool fake_hub_quiet(const struct fake_hub *hub);
const struct fake_stats *fake_hub_stats(const struct fake_hub *hub);
/* Over all events so far, in order: equal seeds and calls, equal digests. */
uint64_t fake_digest(const struct fake_hub *hub);
/* Every event in words ("n0->n1 #12 request write 4096"); NULL switches it off. */
void fake_hub_trace(struct fake_hub *hub, void (*on_event)(void *arg, const char *words),
		    void *arg);

#endif
