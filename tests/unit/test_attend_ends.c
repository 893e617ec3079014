/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Posts that end before they are done: each way to end in each phase. Behind the end
 * nothing writes to the seat, whatever comes late, and nothing is left at either daemon.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/base/mem.h"
#include "daemon/handshake/handshake.h"
#include "daemon/loop/offload.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "daemon/store/store_figures.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/attend_world.h"

#define SOON (20 * LOOP_NS_PER_MS)
#define MANY 4096u /* rows: more than is under way at a time, if they are two parts */
#define MARK 0xa5
#define REUSES 80u /* puts of AW_CHUNKS: more than there is memory for */

enum phase {
	QUEUED_HERE, /* it waits for a thread */
	AT_WORK_HERE,
	QUEUED_THERE,
	AT_WORK_THERE,
	NOT_ANSWERED, /* the message, or its answer, is lost */
	NOT_SENT,     /* legs wait until others are answered */
	STARTS_HERE,  /* a leg is made, those here are not; as the next, not answered */
	STARTS_THERE,
	GATHERED,
	PHASES,
};

enum end {
	CANCELED,
	LATE,
	CLOSED,
	UNREGISTERED,
	SESSION_ENDS,
	HOLDER_DIES,
	CUT_OFF, /* the two do not reach each other */
	STOPPED, /* this daemon */
	HOLDER_STOPPED,
	/* what becomes of chunks while they are attended: others are to have their memory
	 */
	HOLD_CLOSED, /* and its chunks are dropped */
	DROPPED,     /* chunks of a hold */
	EVICTED,     /* chunks of no hold any more */
	OWNER_ENDS,  /* the session that put them, and then they are evicted */
	ENDS,
};

static const char *const phases[] = {"queued here",   "at work here", "queued there",
				     "at work there", "not answered", "not sent",
				     "starts here",   "starts there", "gathered"};
static const char *const ends[] = {
	"canceled",    "late",	  "closed",    "unregistered",	 "session ends",
	"holder dies", "cut off", "stopped",   "holder stopped", "hold closed",
	"dropped",     "evicted", "owner ends"};

static bool lost;
static struct session *owner; /* of the holder's chunks */

static bool is_starting(enum phase phase)
{
	return phase == STARTS_HERE || phase == STARTS_THERE;
}

/* The holder's answer is lost. */
static bool is_lost(enum phase phase)
{
	return phase == NOT_ANSWERED || phase == NOT_SENT || is_starting(phase);
}

static bool tap(unsigned int node, const struct wire_header *h, struct cursor body,
		void *arg)
{
	(void)body;
	(void)arg;
	return lost && node == AW_REQUESTER && h->type == WIRE_T_ATTENTION_RESULT;
}

static struct offload *offload_of(struct attend_world *w, unsigned int node)
{
	return w->c.nodes[node].kvd.offload;
}

static struct attend_figures figures(const struct attend_world *w, unsigned int node)
{
	struct attend_figures f;

	attends_figures(attends_of(&w->c.nodes[node].kvd), &f);
	return f;
}

static void seat_mark(struct attend_world *w, unsigned int seat)
{
	attend_world_rows(w, seat, 3);
	memset(attend_world_floats(w, seat, w->o), MARK, w->seat_bytes - w->o);
}

static void seat_is_still(const struct attend_world *w, unsigned int seat)
{
	const uint8_t *at = (const uint8_t *)attend_world_floats(w, seat, w->o);

	for (uint64_t i = 0; i < w->seat_bytes - w->o; i++)
		assert_int_equal(at[i], MARK);
}

/* Another engine of the holder's, with the same cache: it goes on where the owner ends.
 */
static void owner_has_company(struct attend_world *w)
{
	struct cache old = w->cache[AW_HOLDER];

	owner = w->engine[AW_HOLDER];
	w->engine[AW_HOLDER] = cluster_engine(&w->c, AW_HOLDER, "another");
	w->cache[AW_HOLDER] = cluster_geometry;
	cluster_cache(&w->c, w->engine[AW_HOLDER], "kv", 0, &w->cache[AW_HOLDER]);
	memcpy(w->cache[AW_HOLDER].base, old.base, old.bytes);
	cache_close(&old);
}

/* Seat 0 into the phase; seat 1 is in front of it where it waits for a thread. */
static void enter(struct attend_world *w, enum phase phase, unsigned int deadline_us)
{
	struct kvd_ring_part parts[2] = {attend_world_part(w->near),
					 attend_world_part(w->hold)};
	bool here = phase == QUEUED_HERE || phase == AT_WORK_HERE;
	struct kvd_ring_entry e;
	struct payload p = {0};

	if (phase == NOT_SENT || phase == GATHERED) {
		w->rows = MANY;
		w->attend = attend_world_open(w, "");
		parts[0] = attend_world_part(w->hold); /* twice, there */
		parts[0].rows = parts[1].rows = MANY;
	}
	if (phase == STARTS_HERE) {
		parts[0] = parts[1];
		parts[1] = attend_world_part(w->near);
	}
	seat_mark(w, 0);
	w->held = here || phase == GATHERED;
	offload_hold(offload_of(w, AW_REQUESTER), w->held);
	offload_hold(offload_of(w, AW_HOLDER),
		     phase == QUEUED_THERE || phase == AT_WORK_THERE);
	lost = is_lost(phase);
	if (phase == QUEUED_HERE || phase == QUEUED_THERE) {
		attend_world_rows(w, 1, 4);
		attend_world_post_for(w, 1, &parts[here ? 0 : 1], 60000000);
		cluster_run(&w->c, SOON);
	}
	e = attend_world_entry(w, 0, 0);
	e.n2 = deadline_us;
	payload_add(&p, parts, sizeof(parts));
	p.views = p.len;
	p.count = 2;
	loop_virtual_parts(w->c.loop, is_starting(phase));
	entry_give(&w->c, w->engine[AW_REQUESTER], &e, &p);
	if (is_starting(phase)) {
		assert_true(attend_world_state(w, 0) < KVD_TRANSFERRING);
	} else {
		cluster_run(&w->c, SOON);
		assert_int_equal(attend_world_state(w, 0), KVD_TRANSFERRING);
	}
	seat_is_still(w, 0);
}

/* Of all of a cache, and back. */
static void cache_turn(struct cache *cache)
{
	for (uint64_t i = 0; i < cache->bytes; i++)
		cache->base[i] ^= 0x35;
}

/* Where chunks lay that nobody has pinned are other bytes from now on: others come, and
 * are looked for, more than there is memory for; what stays is found again least. */
static void memory_is_reused(struct attend_world *w, unsigned int node)
{
	/* few at once: their plan is made on the loop, where the helpers are held up */
	enum { FEW = AW_CHUNKS / 2 };

	cache_turn(&w->cache[node]);
	for (unsigned int i = 0; i < REUSES * AW_CHUNKS / FEW; i++) {
		unsigned int first = 100 + i * FEW;

		attend_world_put(w, node, first, FEW, 4);
		for (unsigned int hits = 0; hits < 2 * FEW; hits++)
			cluster_ok(&w->c, w->engine[node],
				   "{'cmd':'chunk.find','space':%llu,'first':%u,'ids':["
				   "'%064x']}",
				   (unsigned long long)w->space[node], hits % FEW,
				   first + hits % FEW);
	}
	cache_turn(&w->cache[node]);
}

static void chunks_are_dropped(struct attend_world *w, unsigned int node,
			       unsigned int first)
{
	for (unsigned int i = 0; i < AW_CHUNKS; i++)
		cluster_ok(&w->c, w->engine[node],
			   "{'cmd':'chunk.drop','space':%llu,'first':%u,'ids':['%064x']}",
			   (unsigned long long)w->space[node], i, first + i);
}

static void holds_are_closed(struct attend_world *w)
{
	const uint64_t holds[2] = {w->hold, w->near};

	for (unsigned int i = 0; i < 2; i++)
		cluster_ok(&w->c, w->engine[AW_REQUESTER],
			   "{'cmd':'chunk.release','hold':%llu}",
			   (unsigned long long)holds[i]);
	cluster_run(&w->c, SOON);
}

static void chunks_go(struct attend_world *w, enum end end)
{
	if (end == HOLD_CLOSED || end == EVICTED)
		holds_are_closed(w);
	if (end == HOLD_CLOSED || end == DROPPED) {
		chunks_are_dropped(w, AW_HOLDER, 1);
		chunks_are_dropped(w, AW_REQUESTER, 11);
	}
	if (end == OWNER_ENDS)
		cluster_engine_dies(&w->c, owner);
	memory_is_reused(w, AW_HOLDER);
	memory_is_reused(w, AW_REQUESTER);
}

static void end_it(struct attend_world *w, enum end end)
{
	struct session *engine = w->engine[AW_REQUESTER];
	struct kvd_ring_entry cancel = {.op = KVD_RING_CANCEL,
					.a = KVD_RING_IDS + AW_SLOT};

	switch (end) {
	case CANCELED:
		entry_give(&w->c, engine, &cancel, NULL);
		break;
	case LATE:
		cluster_run(&w->c, 200 * LOOP_NS_PER_MS);
		break;
	case CLOSED:
		cluster_ok(&w->c, engine, "{'cmd':'attention.close','attend':%llu}",
			   (unsigned long long)w->attend);
		break;
	case UNREGISTERED:
		if (w->held) { /* helpers unmap it, and do not come to that */
			attends_region_going(region_find(engine, w->region));
			break;
		}
		cluster_ok(&w->c, engine, "{'cmd':'region.unregister','region':%llu}",
			   (unsigned long long)w->region);
		break;
	case SESSION_ENDS:
		cluster_engine_dies(&w->c, engine);
		break;
	case HOLDER_DIES:
		cluster_crash(&w->c, AW_HOLDER, MEM_CRASH_KILLED);
		break;
	case CUT_OFF:
		mem_hub_partition(w->c.links, w->c.nodes[0].endpoint,
				  w->c.nodes[1].endpoint, true);
		break;
	case STOPPED:
	case HOLDER_STOPPED:
		attends_close(attends_of(
			&w->c.nodes[end == STOPPED ? AW_REQUESTER : AW_HOLDER].kvd));
		break;
	default:
		chunks_go(w, end);
	}
}

/* What was held up goes on. */
static void let_go(struct attend_world *w)
{
	offload_hold(offload_of(w, AW_REQUESTER), false);
	offload_hold(offload_of(w, AW_HOLDER), false);
	cluster_run(&w->c, LOOP_NS_PER_S);
	loop_virtual_parts(w->c.loop, 0);
}

/* Does the holder matter to what is not done yet? */
static bool needs_holder(enum phase phase)
{
	return phase != GATHERED && phase != QUEUED_HERE && phase != AT_WORK_HERE;
}

static bool is_queued(enum phase phase)
{
	return phase == QUEUED_HERE || phase == QUEUED_THERE;
}

/* The post in front of it goes on. */
static bool spares_others(enum end end)
{
	return end == CANCELED || end == LATE || end == HOLDER_STOPPED;
}

static bool has_ended(enum phase phase, enum end end)
{
	if (end == HOLDER_DIES || end == CUT_OFF)
		return needs_holder(phase);
	if (end == HOLDER_STOPPED) /* what is in the kernel is told when it is done */
		return phase == QUEUED_THERE;
	return end < HOLD_CLOSED;
}

/* What becomes of it, when what was held up goes on. */
static unsigned int state_due(enum phase phase, enum end end)
{
	if (is_lost(phase))
		return KVD_TRANSFERRING; /* what was lost is not told again */
	if (phase == AT_WORK_THERE && end == HOLDER_STOPPED)
		return KVD_FAILED;
	return KVD_SUCCESS;
}

/* All of its rows, with the same 64 tokens `times` times. */
static void seat_is_right(const struct attend_world *w, unsigned int seat,
			  unsigned int times)
{
	for (unsigned int row = 0; row < w->rows; row++)
		attend_world_floats(w, seat, w->l)[row] /= (float)times;
	attend_world_right(w, seat, 0, AW_CHUNKS * AW_CHUNK, NULL, 0);
}

static void ends_in_phase(enum phase phase, enum end end)
{
	struct attend_world w;

	print_message("%s, %s\n", phases[phase], ends[end]);
	attend_world_tap = tap;
	attend_world_new(&w, 1);
	if (end == OWNER_ENDS)
		owner_has_company(&w);
	enter(&w, phase, end == LATE ? 100000 : 60000000);
	end_it(&w, end);
	cluster_run(&w.c,
		    end == HOLDER_DIES || end == CUT_OFF ? 20 * LOOP_NS_PER_S : SOON);
	if (end != SESSION_ENDS && has_ended(phase, end)) {
		assert_int_equal(attend_world_state(&w, 0), KVD_FAILED);
		assert_int_not_equal(attend_world_error(&w, 0), ERR_OK);
	}
	if (has_ended(phase, end)) {
		seat_is_still(&w, 0);
		assert_int_equal(figures(&w, AW_REQUESTER).live,
				 is_queued(phase) && spares_others(end));
		lost = false;
		let_go(&w);
		seat_is_still(&w, 0);
	} else {
		lost = false;
		let_go(&w);
		assert_int_equal(attend_world_state(&w, 0), state_due(phase, end));
		if (state_due(phase, end) == KVD_SUCCESS)
			seat_is_right(&w, 0, 2);
		else
			seat_is_still(&w, 0);
		if (is_queued(phase))
			seat_is_right(&w, 1, 1);
	}
	attend_world_quiet(&w);
	attend_world_free(&w);
	attend_world_tap = NULL;
}

static void every_end_in_every_phase_is_quiesced(void **state)
{
	(void)state;
	for (unsigned int phase = 0; phase < PHASES; phase++) {
		for (unsigned int end = 0; end < ENDS; end++)
			ends_in_phase(phase, end);
	}
}

/* The nth allocation from when the holder's kernel is done fails. False: there were
 * fewer. */
static bool answered_without(uint64_t nth)
{
	struct attend_world w;
	bool met;

	attend_world_tap = tap;
	attend_world_new(&w, 1);
	enter(&w, AT_WORK_THERE, 60000000);
	mem_fail_at(nth);
	offload_hold(offload_of(&w, AW_HOLDER), false);
	cluster_run(&w.c, LOOP_NS_PER_S);
	met = mem_count() >= nth;
	mem_fail_at(0);
	assert_int_not_equal(attend_world_state(&w, 0), KVD_TRANSFERRING);
	assert_int_equal(figures(&w, AW_REQUESTER).live, 0);
	assert_int_equal(attend_remote(attend_world_remote(&w, AW_REQUESTER))->sent, 0);
	attend_world_free(&w);
	attend_world_tap = NULL;
	return met;
}

static void answer_without_memory_is_answered(void **state)
{
	(void)state;
	for (uint64_t nth = 1; nth < 40 && answered_without(nth); nth++)
		;
}

/* Rooms are told of it in parts, over several turns. */
static void session_with_rooms_ends_its_posts_at_once(void **state)
{
	struct attend_world w;

	(void)state;
	attend_world_tap = tap;
	attend_world_new(&w, 1);
	for (unsigned int room = 1; room <= 8; room++)
		cluster_ok(&w.c, w.engine[AW_REQUESTER],
			   "{'cmd':'room.open','room':'%u','role':'send','pool':%llu}",
			   room, (unsigned long long)w.cache[AW_REQUESTER].pool);
	enter(&w, AT_WORK_HERE, 60000000);
	loop_virtual_parts(w.c.loop, 1);
	cluster_engine_dies(&w.c, w.engine[AW_REQUESTER]);
	assert_int_equal(figures(&w, AW_REQUESTER).live, 0);
	let_go(&w);
	seat_is_still(&w, 0);
	attend_world_quiet(&w);
	attend_world_free(&w);
	attend_world_tap = NULL;
}

/* The nth allocation from a question for chunks of the other daemon on fails. False:
 * there were fewer. */
static bool held_without(uint64_t nth)
{
	struct attend_world w;
	struct store_figures store;
	cJSON *answer;
	bool met;

	attend_world_new(&w, 1);
	cluster_ok(&w.c, w.engine[AW_REQUESTER], "{'cmd':'chunk.release','hold':%llu}",
		   (unsigned long long)w.hold);
	mem_fail_at(nth);
	answer = cluster_call(&w.c, w.engine[AW_REQUESTER],
			      "{'cmd':'chunk.hold','space':%llu,'ids':['%064x'],"
			      "'lease_ms':600000,'remote_ms':50}",
			      (unsigned long long)w.space[AW_REQUESTER], 1);
	met = mem_count() >= nth;
	mem_fail_at(0);
	if (cJSON_GetObjectItem(answer, "hold"))
		cluster_ok(&w.c, w.engine[AW_REQUESTER],
			   "{'cmd':'chunk.release','hold':%llu}",
			   (unsigned long long)cJSON_GetObjectItem(answer, "hold")
				   ->valuedouble);
	cJSON_Delete(answer);
	cluster_run(&w.c, LOOP_NS_PER_S);
	store_figures(store_of(&w.c.nodes[AW_HOLDER].kvd), &store);
	assert_int_equal(store.remote.holds, 0);
	attend_world_free(&w);
	return met;
}

static void hold_unreported_is_released(void **state)
{
	(void)state;
	for (uint64_t nth = 1; nth < 80 && held_without(nth); nth++)
		;
}

/* As when a daemon stops: the chunks' memory is of a session of its own. */
static void memory_of_chunks_outlasts_the_kernel(void **state)
{
	struct attend_world w;
	const struct region *region;
	struct session *session;
	struct kvd *kvd;

	(void)state;
	attend_world_tap = tap;
	attend_world_new(&w, 1);
	enter(&w, AT_WORK_THERE, 60000000);
	kvd = &w.c.nodes[AW_HOLDER].kvd;
	region = store_of(kvd)->region;
	attends_close(attends_of(kvd));
	list_foreach_safe(session, &kvd->sessions, link)
		session_end(session, "the daemon is stopping");
	cluster_run(&w.c, SOON);
	assert_true(region->pins >
		    0); /* helpers, which would unmap it, are held up, too */
	let_go(&w);
	assert_int_equal(kvd->session_count, 0);
	attend_world_quiet(&w);
	attend_world_free(&w);
	attend_world_tap = NULL;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(answer_without_memory_is_answered),
		cmocka_unit_test(session_with_rooms_ends_its_posts_at_once),
		cmocka_unit_test(memory_of_chunks_outlasts_the_kernel),
		cmocka_unit_test(hold_unreported_is_released),
		cmocka_unit_test(every_end_in_every_phase_is_quiesced),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests_name("attend_ends", tests, NULL, NULL);
}
