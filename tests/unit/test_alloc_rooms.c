/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every course that a room can take while its 1st, 2nd, ... allocation fails, on
 * whichever daemon that is: two sources, one receiver, push and pull, ends of every
 * kind. Whatever fails, commands are done or refused, every room ends, success
 * means all bytes, nothing moves after an end, no peer is lost that was not cut by
 * the test, no heap block stays, and the next room works. The moves of the rooms'
 * state machine are counted: one that no course takes fails the test.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/loop/offload.h"
#include "daemon/peer/peer.h"
#include "daemon/room/rooms_set.h"
#include "tests/lib/cluster.h"

#define MS LOOP_NS_PER_MS
#define TOKENS 14u
#define LIMITS ",'timeouts':{'bootstrap_ms':3000,'waiting_ms':3000,'stall_ms':1500}"
#define ENGINES 4u
#define NODES 3u

static const struct cache geometry = {.layers = 2,
				      .pages = 16,
				      .page_tokens = 4,
				      .units = 2,
				      .total_units = 4,
				      .unit_bytes = 16,
				      .aux_slots = 2,
				      .aux_bytes = 32};
static const unsigned int src_pages[] = {3, 4, 9, 1}, dst_pages[] = {7, 2, 8, 12};

enum { A, B, C, D }; /* a and c prefill a half of the heads each, d as a, b decodes */
static const unsigned int node_of[ENGINES] = {0, 1, 2, 2};

struct world {
	struct cluster c;
	struct session *engines[ENGINES];
	struct cache caches[ENGINES];
	uint64_t room;
	uint8_t *still; /* of b's memory when its room had ended */
	bool cut;	/* the test took a peer or an engine away */
	unsigned int runs, allocations;
};

/* ---- engines and their memory ---- */

static uint8_t pattern(unsigned int layer, unsigned int field, unsigned int token,
		       unsigned int unit, unsigned int b)
{
	return (uint8_t)(1 + layer * 7 + field * 31 + token * 13 + unit * 5 + b);
}

static void engine_new(struct world *w, unsigned int i)
{
	static const char *const names[] = {"engine a", "engine b", "engine c",
					    "engine d"};
	struct cache *k = &w->caches[i];

	w->engines[i] = cluster_engine(&w->c, node_of[i], names[i]);
	*k = geometry;
	k->units = i == B ? 4 : 2;
	k->first_unit = i == C ? 2 : 0;
	cluster_cache(&w->c, w->engines[i], i == D ? "spare" : "kv", i < C ? 0 : i - 1,
		      k);
	if (i == B)
		return;
	for (unsigned int l = 0; l < k->layers; l++)
		for (unsigned int f = 0; f < 2; f++)
			for (unsigned int t = 0; t < TOKENS; t++)
				for (unsigned int u = 0; u < k->units; u++)
					for (unsigned int b = 0; b < k->unit_bytes; b++)
						*cache_at(k, l, f, src_pages[t / 4],
							  t % 4, u + k->first_unit, b) =
							pattern(l, f, t,
								u + k->first_unit, b);
	memcpy(cache_aux(k, 1), "aux of the request", 18);
}

static bool all_arrived(const struct world *w)
{
	const struct cache *k = &w->caches[B];

	for (unsigned int l = 0; l < k->layers; l++)
		for (unsigned int f = 0; f < 2; f++)
			for (unsigned int t = 0; t < TOKENS; t++)
				for (unsigned int u = 0; u < k->units; u++)
					for (unsigned int b = 0; b < k->unit_bytes; b++)
						if (*cache_at(k, l, f, dst_pages[t / 4],
							      t % 4, u, b) !=
						    pattern(l, f, t, u, b))
							return false;
	return memcmp(cache_aux(k, 0), "aux of the request", 18) == 0;
}

/* ---- what engines say ---- */

static const char *code_of(const cJSON *answer)
{
	if (cJSON_IsTrue(cJSON_GetObjectItem(answer, "ok")))
		return "ok";
	return cJSON_GetStringValue(
		cJSON_GetObjectItem(cJSON_GetObjectItem(answer, "error"), "code"));
}

/* The room's own error, in answer to what comes too late. */
static bool is_over(const cJSON *answer)
{
	const char *text = cJSON_GetStringValue(
		cJSON_GetObjectItem(cJSON_GetObjectItem(answer, "error"), "message"));

	return text && strncmp(text, "room ", 5) == 0 && strstr(text, " failed: ");
}

/* Refused for want of memory it works the second time, unless its room is over. */
static void say(struct world *w, unsigned int who, const char *fmt, ...)
{
	char text[1024], code[16];
	bool over = false;
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	for (int i = 0; i < 2 && !over; i++) {
		cJSON *answer = cluster_call(&w->c, w->engines[who], "%s", text);

		snprintf(code, sizeof(code), "%s", code_of(answer));
		over = is_over(answer);
		cJSON_Delete(answer);
		if (strcmp(code, "ENOMEM") != 0)
			break;
	}
	if (strcmp(code, "ok") != 0 && strcmp(code, "ESTATE") != 0 && !over)
		fail_msg("%s: %s", text, code);
}

#define ROOM(w) ((unsigned long long)(w)->room)

static void open_send(struct world *w, unsigned int who)
{
	say(w, who,
	    "{'cmd':'room.open','room':'%llu','role':'send','pool':%llu" LIMITS "}",
	    ROOM(w), (unsigned long long)w->caches[who].pool);
}

static void open_recv_from(struct world *w, const char *more)
{
	say(w, B,
	    "{'cmd':'room.open','room':'%llu','role':'recv','pool':%llu,'sources':[{"
	    "'endpoint':'%s','pool':'kv'},{'endpoint':'%s','pool':'kv'}%s]" LIMITS "}",
	    ROOM(w), (unsigned long long)w->caches[B].pool, w->c.nodes[0].endpoint,
	    w->c.nodes[2].endpoint, more);
}

static void open_recv(struct world *w)
{
	open_recv_from(w, "");
}

static void bind(struct world *w)
{
	say(w, B,
	    "{'cmd':'room.bind','room':'%llu','aux':0,'views':{'kv':{'pages':[7,2,8,12],"
	    "'tokens':[0,14]}}}",
	    ROOM(w));
}

static void send_first(struct world *w, unsigned int who)
{
	say(w, who,
	    "{'cmd':'room.send','room':'%llu','seq':0,'views':{'kv':{'pages':[3,4]}}}",
	    ROOM(w));
}

static void send_last(struct world *w, unsigned int who)
{
	say(w, who,
	    "{'cmd':'room.send','room':'%llu','seq':1,'last':true,'aux':1,'views':{'kv':{"
	    "'pages':[9,1],'first_token':8,'tokens':[8,14]}}}",
	    ROOM(w));
}

static void send_all(struct world *w)
{
	send_first(w, A);
	send_first(w, C);
	send_last(w, A);
	send_last(w, C);
}

static void open_offer(struct world *w, unsigned int who, unsigned int lease_ms)
{
	say(w, who,
	    "{'cmd':'room.open','room':'%llu','role':'offer','pool':%llu,'aux':1,'lease_"
	    "ms':"
	    "%u,'views':{'kv':{'pages':[3,4,9,1],'tokens':[0,14]}}" LIMITS "}",
	    ROOM(w), (unsigned long long)w->caches[who].pool, lease_ms);
}

static void open_pull(struct world *w)
{
	say(w, B,
	    "{'cmd':'room.open','room':'%llu','role':'pull','pool':%llu,'sources':[{"
	    "'endpoint':'%s','pool':'kv'},{'endpoint':'%s','pool':'kv'}],'aux':0,"
	    "'views':{'kv':{'pages':[7,2,8,12],'tokens':[0,14]}}" LIMITS "}",
	    ROOM(w), (unsigned long long)w->caches[B].pool, w->c.nodes[0].endpoint,
	    w->c.nodes[2].endpoint);
}

static void end_of(struct world *w, unsigned int who, const char *cmd)
{
	cJSON *answer = cluster_call(&w->c, w->engines[who], "{'cmd':'%s','room':'%llu'}",
				     cmd, ROOM(w));

	if (strcmp(code_of(answer), "ENOMEM") == 0) {
		cJSON_Delete(answer);
		answer = cluster_call(&w->c, w->engines[who],
				      "{'cmd':'%s','room':'%llu'}", cmd, ROOM(w));
	}
	if (strcmp(code_of(answer), "ENOMEM") == 0)
		fail_msg("%s twice without memory", cmd);
	cJSON_Delete(answer);
}

static void pass_ms(struct world *w, unsigned int ms)
{
	cluster_run(&w->c, ms * MS);
}

/* ---- the courses ---- */

static void begin_push(struct world *w)
{
	open_send(w, A);
	open_send(w, C);
	open_recv(w);
	bind(w);
	pass_ms(w, 20);
}

static void slow_down(struct world *w)
{
	struct fake_profile *profile = fake_hub_profile(w->c.bytes);

	profile->slice_bytes = 64;
	profile->slice_ns = 2 * MS;
}

static void push(struct world *w)
{
	begin_push(w);
	send_all(w);
}

/* d holds what a holds: nothing is asked of it, and it is told so. */
static void push_with_an_idle_source(struct world *w)
{
	char more[160];

	snprintf(more, sizeof(more), ",{'endpoint':'%s','pool':'spare'}",
		 w->c.nodes[2].endpoint);
	open_send(w, A);
	open_send(w, C);
	open_send(w, D);
	open_recv_from(w, more);
	bind(w);
	send_all(w);
	send_last(w, D);
}

/* All of it was cached there: no byte is wanted, and so none moves. */
static void push_of_nothing(struct world *w)
{
	open_send(w, A);
	open_send(w, C);
	open_recv(w);
	say(w, B, "{'cmd':'room.bind','room':'%llu','views':{}}", ROOM(w));
	pass_ms(w, 20);
	say(w, A, "{'cmd':'room.send','room':'%llu','seq':0,'last':true}", ROOM(w));
	say(w, C, "{'cmd':'room.send','room':'%llu','seq':0,'last':true}", ROOM(w));
}

static void push_receiver_first(struct world *w)
{
	open_recv(w);
	bind(w);
	pass_ms(w, 50);
	open_send(w, A);
	open_send(w, C);
	send_all(w);
}

static void push_chunks_before_receiver(struct world *w)
{
	open_send(w, A);
	open_send(w, C);
	send_all(w);
	open_recv(w);
	bind(w);
}

static void push_aborted_by_sender(struct world *w)
{
	slow_down(w);
	push(w);
	pass_ms(w, 10);
	end_of(w, A, "room.abort");
}

static void push_aborted_by_receiver(struct world *w)
{
	slow_down(w);
	push(w);
	pass_ms(w, 10);
	end_of(w, B, "room.abort");
}

/* Its requests and messages find no room any more. */
static void push_closed_under_way(struct world *w)
{
	slow_down(w);
	push(w);
	pass_ms(w, 6);
	end_of(w, B, "room.abort");
	pass_ms(w, 4);
	end_of(w, B, "room.close");
}

static void push_never_bound(struct world *w)
{
	open_send(w, A);
	open_send(w, C);
	open_recv(w);
}

static void push_never_sent(struct world *w)
{
	begin_push(w);
	send_first(w, A);
}

static void push_without_senders(struct world *w)
{
	open_recv(w);
	bind(w);
}

static void push_that_stalls(struct world *w)
{
	const struct fake_rule rule = {.fault = FAKE_STUCK, .times = 1, .at_bytes = 64};

	begin_push(w);
	if (fake_script(w->c.bytes, &rule) < 0) /* the test's own allocation */
		assert_int_equal(fake_script(w->c.bytes, &rule), 0);
	send_all(w);
}

static void push_too_short(struct world *w)
{
	begin_push(w);
	send_last(w, A);
	send_all(w);
}

static void push_to_one_that_left(struct world *w)
{
	open_send(w, A);
	open_send(w, C);
	end_of(w, A, "room.abort");
	pass_ms(w, 5);
	end_of(w, A, "room.close");
	open_recv(w);
	bind(w);
}

static void pull(struct world *w)
{
	open_offer(w, A, 5000);
	open_offer(w, C, 5000);
	open_pull(w);
}

static void pull_before_offers(struct world *w)
{
	open_pull(w);
	pass_ms(w, 50);
	open_offer(w, A, 5000);
	open_offer(w, C, 5000);
}

static void pull_aborted_by_puller(struct world *w)
{
	slow_down(w);
	pull(w);
	pass_ms(w, 10);
	end_of(w, B, "room.abort");
}

static void pull_aborted_by_offerer(struct world *w)
{
	slow_down(w);
	pull(w);
	pass_ms(w, 10);
	end_of(w, C, "room.abort");
}

static void pull_slower_than_its_lease(struct world *w)
{
	struct fake_profile *profile = fake_hub_profile(w->c.bytes);

	slow_down(w);
	profile->slice_ns = 10 * MS;
	open_offer(w, A, 200);
	open_offer(w, C, 200);
	open_pull(w);
}

static void offer_that_nobody_takes(struct world *w)
{
	open_offer(w, A, 300);
	pass_ms(w, 500);
	end_of(w, A, "room.close");
	open_pull(w);
}

static void part(struct world *w, unsigned int x, unsigned int y)
{
	w->cut = true;
	mem_hub_partition(w->c.links, w->c.nodes[node_of[x]].endpoint,
			  w->c.nodes[node_of[y]].endpoint, true);
}

static void push_peer_lost(struct world *w)
{
	slow_down(w);
	push(w);
	pass_ms(w, 5);
	part(w, A, B);
}

static void pull_peer_lost(struct world *w)
{
	slow_down(w);
	pull(w);
	pass_ms(w, 10);
	part(w, B, C);
}

static void dies(struct world *w, unsigned int who)
{
	w->cut = true;
	cluster_engine_dies(&w->c, w->engines[who]);
	w->engines[who] = NULL;
}

static void push_sender_engine_dies(struct world *w)
{
	slow_down(w);
	push(w);
	pass_ms(w, 5);
	dies(w, A);
}

static void push_receiver_engine_dies(struct world *w)
{
	slow_down(w);
	push(w);
	pass_ms(w, 5);
	dies(w, B);
}

static void pull_engine_dies(struct world *w)
{
	slow_down(w);
	pull(w);
	pass_ms(w, 10);
	dies(w, C);
}

struct course {
	const char *name;
	void (*run)(struct world *w);
	bool succeeds; /* with memory */
	bool nothing;  /* is wanted */
};

static const struct course courses[] = {
	{.name = "push", .run = push, .succeeds = true},
	{.name = "push with an idle source",
	 .run = push_with_an_idle_source,
	 .succeeds = true},
	{.name = "push of nothing",
	 .run = push_of_nothing,
	 .succeeds = true,
	 .nothing = true},
	{.name = "push, receiver first", .run = push_receiver_first, .succeeds = true},
	{.name = "push, chunks first",
	 .run = push_chunks_before_receiver,
	 .succeeds = true},
	{.name = "push aborted by a sender", .run = push_aborted_by_sender},
	{.name = "push aborted by the receiver", .run = push_aborted_by_receiver},
	{.name = "push closed while under way", .run = push_closed_under_way},
	{.name = "push never bound", .run = push_never_bound},
	{.name = "push never sent", .run = push_never_sent},
	{.name = "push without senders", .run = push_without_senders},
	{.name = "push that stalls", .run = push_that_stalls},
	{.name = "push too short", .run = push_too_short},
	{.name = "push to one that left", .run = push_to_one_that_left},
	{.name = "push, peer lost", .run = push_peer_lost},
	{.name = "push, sender's engine dies", .run = push_sender_engine_dies},
	{.name = "push, receiver's engine dies", .run = push_receiver_engine_dies},
	{.name = "pull", .run = pull, .succeeds = true},
	{.name = "pull before the offers", .run = pull_before_offers, .succeeds = true},
	{.name = "pull slower than its lease",
	 .run = pull_slower_than_its_lease,
	 .succeeds = true},
	{.name = "pull aborted by the puller", .run = pull_aborted_by_puller},
	{.name = "pull aborted by an offerer", .run = pull_aborted_by_offerer},
	{.name = "pull, peer lost", .run = pull_peer_lost},
	{.name = "pull, offerer's engine dies", .run = pull_engine_dies},
	{.name = "offer that nobody takes", .run = offer_that_nobody_takes},
};

/* ---- what must hold ---- */

static bool moves_seen[ROOM_ROLES][ROOM_STATES][ROOM_STATES];

static void on_move(const struct sm *sm, unsigned int from)
{
	if (sm->table == &room_table)
		moves_seen[container_of(sm, struct room, sm)->role][from][sm_state(sm)] =
			true;
}

static unsigned int live_rooms(const struct world *w)
{
	unsigned int n = 0;

	for (unsigned int i = 0; i < NODES; i++)
		n += rooms_live(rooms_of(&w->c.nodes[i].kvd));
	return n;
}

static bool all_over(void *arg)
{
	return live_rooms(arg) == 0;
}

static struct room *room_of(const struct world *w, unsigned int who)
{
	struct room *room = NULL;

	for (unsigned int role = 0; role < ROOM_ROLES && w->engines[who] && !room; role++)
		room = rooms_find(rooms_of(&w->c.nodes[node_of[who]].kvd),
				  w->engines[who], (enum room_role)role, w->room);
	return room;
}

static bool succeeded(const struct world *w, unsigned int who)
{
	const struct room *room = room_of(w, who);

	return room && sm_state(&room->sm) == ROOM_SUCCESS;
}

static bool sent(const struct world *w, unsigned int who)
{
	return succeeded(w, who) && room_of(w, who)->role == ROOM_SEND;
}

/* A source of a push says success only when its receiver did (an offerer when its own
 * part was taken); the receiver when all came. */
static void check_ends(struct world *w, const struct course *course, uint64_t nth,
		       bool hit)
{
	bool receiver = succeeded(w, B);
	const struct cache *dst = &w->caches[B];

	if ((sent(w, A) || sent(w, C)) && !receiver && !w->cut)
		fail_msg("%s, allocation %ju: a source succeeded alone", course->name,
			 (uintmax_t)nth);
	if (receiver && !course->nothing && !all_arrived(w))
		fail_msg("%s, allocation %ju: success without the bytes", course->name,
			 (uintmax_t)nth);
	if (!hit && course->succeeds && !(receiver && succeeded(w, A) && succeeded(w, C)))
		fail_msg("%s did not succeed", course->name);
	if (!w->engines[B])
		return;
	memcpy(w->still, dst->base, dst->bytes);
	pass_ms(w, 300);
	if (memcmp(w->still, dst->base, dst->bytes) != 0)
		fail_msg("%s, allocation %ju: bytes came after the end", course->name,
			 (uintmax_t)nth);
}

static unsigned int peers_up(const struct world *w)
{
	unsigned int n = 0;

	for (unsigned int i = 0; i < NODES; i++) {
		const struct remote *remote;

		list_foreach(remote, handshake_remotes(w->c.nodes[i].kvd.handshake), link)
			n += remote->ready;
	}
	return n;
}

static uint64_t peer_epochs(const struct world *w)
{
	uint64_t sum = 0;

	for (unsigned int i = 0; i < NODES; i++) {
		const struct remote *remote;

		list_foreach(remote, handshake_remotes(w->c.nodes[i].kvd.handshake), link)
			sum += remote->peer->epoch;
	}
	return sum;
}

static bool peers_are_back(void *arg)
{
	return peers_up(arg) == 4; /* a-b and b-c, each seen from both sides */
}

/* Heal what the course broke, take the rooms away. */
static void tidy(struct world *w)
{
	struct fake_profile *profile = fake_hub_profile(w->c.bytes);

	fake_script_clear(w->c.bytes);
	profile->slice_bytes = 256;
	profile->slice_ns = 1000;
	for (unsigned int i = 0; i < ENGINES; i++) {
		if (room_of(w, i))
			cluster_ok(&w->c, w->engines[i],
				   "{'cmd':'room.close','room':'%llu'}", ROOM(w));
		if (i != B)
			mem_hub_partition(w->c.links, w->c.nodes[1].endpoint,
					  w->c.nodes[node_of[i]].endpoint, false);
		if (!w->engines[i]) {
			cache_close(&w->caches[i]);
			engine_new(w, i);
		}
	}
	memset(w->caches[B].base, 0, w->caches[B].bytes);
	for (unsigned int i = 0; i < 3 && peers_up(w) < 4; i += 2)
		cluster_ok(&w->c, w->engines[B],
			   "{'cmd':'peer.connect','endpoint':'%s','timeout_ms':60000}",
			   w->c.nodes[i].endpoint);
	cluster_until(&w->c, peers_are_back, w, "data lines are up");
}

/* Blocks in use when no message is under way, without the tombstones' keys and the map of
 * receivers that could not start: the first of them comes when an allocation fails. */
static int64_t blocks(struct world *w)
{
	int64_t least = INT64_MAX, tombs = 0;

	pass_ms(w, 2500); /* orphans have their time */
	for (int i = 0; i < 60; i++) {
		pass_ms(w, 7);
		least = mem_live() < least ? mem_live() : least;
	}
	for (unsigned int i = 0; i < NODES; i++) {
		const struct rooms *rooms = rooms_of(&w->c.nodes[i].kvd);

		assert_int_equal(rooms->early_count, 0);
		tombs += (int64_t)strmap_count(&rooms->tomb_by_pool) +
			 !!rooms->tomb_by_pool.map.old +
			 !!rooms->early_by_key.map.entries +
			 !!rooms->early_by_key.map.index;
	}
	return least - tombs;
}

/* True while there was an allocation to fail. */
static bool attempt(struct world *w, const struct course *course, uint64_t nth)
{
	uint64_t epochs = peer_epochs(w);
	char what[96];
	bool hit;

	w->room++;
	w->cut = false;
	snprintf(what, sizeof(what), "%s, allocation %ju: every room ends", course->name,
		 (uintmax_t)nth);
	mem_fail_at(nth);
	course->run(w);
	cluster_until(&w->c, all_over, w, what);
	pass_ms(w, 20);
	hit = nth && mem_count() >= nth;
	w->allocations = (unsigned int)mem_count();
	mem_fail_at(0);
	check_ends(w, course, nth, hit);
	if (!hit && !w->cut && peer_epochs(w) != epochs)
		fail_msg("%s: a peer was lost", course->name);
	tidy(w);
	w->runs++;
	return hit;
}

static void sweep(struct world *w, const struct course *course)
{
	int64_t before, after;
	uint64_t nth = 0;
	bool hit;

	for (unsigned int i = 0; i < 8;
	     i++)		       /* what is made on first use; who of a and d */
		attempt(w, course, 0); /* is idle, the room's number says */
	attempt(w, &courses[0], 0);
	before = blocks(w);
	do {
		nth++;
		hit = attempt(w, course, nth);
		attempt(w, &courses[0], 0); /* the next room works */
	} while (hit);
	after = blocks(w);
	if (after > before)
		fail_msg("%s: %jd heap blocks more after %ju runs", course->name,
			 (intmax_t)(after - before), (uintmax_t)nth);
	if (getenv("KVD_TEST_LOG"))
		print_message("%s: %ju allocations\n", course->name, (uintmax_t)nth - 1);
}

static int setup(void **state)
{
	struct world *w = calloc(1, sizeof(*w));

	cluster_new(&w->c, 1, NODES);
	for (unsigned int i = 0; i < ENGINES; i++) {
		w->c.nodes[node_of[i]].config.early_request_ttl_ns = 2 * LOOP_NS_PER_S;
		engine_new(w, i);
	}
	w->still = malloc(w->caches[B].bytes);
	w->room = 100;
	sm_watch(on_move);
	tidy(w);
	*state = w;
	return 0;
}

static int teardown(void **state)
{
	struct world *w = *state;

	sm_watch(NULL);
	cluster_free(&w->c);
	for (unsigned int i = 0; i < ENGINES; i++)
		cache_close(&w->caches[i]);
	free(w->still);
	free(w);
	return 0;
}

static void room_without_one_allocation_ends_and_the_next_works(void **state)
{
	struct world *w = *state;
	const char *only = getenv("KVD_TEST_COURSE");

	for (size_t i = 0; i < ARRAY_LEN(courses); i++)
		attempt(w, &courses[i], 0); /* the first tombstones, orphans, leases */
	for (size_t i = 0; i < ARRAY_LEN(courses); i++) {
		if (!only || strcmp(courses[i].name, only) == 0)
			sweep(w, &courses[i]);
	}
	print_message("%u rooms with an allocation lost\n", w->runs);
}

/* After the sweep: every move that the table allows was made in it. */
static void every_move_of_a_room_was_swept(void **state)
{
	(void)state;
	for (unsigned int from = 0; from < ROOM_STATES; from++) {
		for (unsigned int to = 0; to < ROOM_STATES; to++) {
			bool seen = false;

			if (!(room_table.states[from].to & SM_TO(to)))
				continue;
			for (unsigned int role = 0; role < ROOM_ROLES; role++)
				seen |= moves_seen[role][from][to];
			if (!seen)
				fail_msg("no course goes from %s to %s",
					 room_state_names[from], room_state_names[to]);
		}
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(
			room_without_one_allocation_ends_and_the_next_works, setup,
			teardown),
		cmocka_unit_test(every_move_of_a_room_was_swept),
	};

	int failed = cmocka_run_group_tests_name("alloc_rooms", tests, NULL, NULL);

	memset(moves_seen, 0, sizeof(moves_seen));
	cluster_short_parts();
	return failed +
	       cmocka_run_group_tests_name("alloc_rooms, long lists", tests, NULL, NULL);
}
