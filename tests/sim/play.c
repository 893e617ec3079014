/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Engines and their requests. Up to four prefill ranks hand requests over to up
 * to four decode ranks, by push or by pull; each rank is an engine of its own on
 * one of the places, with a cache of its own page size. What a request is (its
 * tokens, prefix, chunks and their order) is drawn when it begins; what happens
 * to it, and when, is the script's.
 *
 * A daemon's death takes its engines' sessions with it: to the engine all its
 * rooms have ended then, and their memory is judged as still from that moment.
 * The engine itself lives on, with the same memory, at the daemon that comes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/base/mem.h"
#include "daemon/loop/offload.h"
#include "daemon/room/rooms.h"
#include "daemon/session/status.h"
#include "tests/sim/sim.h"

#define PAGE_BYTES (64u * 4096u)    /* of the status page: slots are used in order */
#define END_NS (14 * LOOP_NS_PER_S) /* everything is terminal after this */
#define CALM_END_NS (4 * LOOP_NS_PER_S)

static uint64_t now_of(const struct sim *sim)
{
	return loop_now_ns(sim->c.loop);
}

struct kvd *sim_kvd(struct sim *sim, unsigned int place)
{
	return &sim->c.nodes[sim->at[place]].kvd;
}

unsigned int sim_side_count(const struct sim *sim, bool source)
{
	return source ? sim->script->sources : sim->script->sinks;
}

static void let_run(struct sim *sim, uint64_t ns)
{
	for (uint64_t end = now_of(sim) + ns; now_of(sim) < end; sim_observe(sim))
		loop_turn(sim->c.loop, end - now_of(sim));
}

bool sim_answered_ok(cJSON *answer)
{
	bool ok = !cJSON_GetObjectItem(answer, "error");

	cJSON_Delete(answer);
	return ok;
}

/* ---- engines ---- */

static struct sim_namesake *namesake_of(struct sim *sim, const struct sim_engine *e)
{
	struct sim_namesake *namesake =
		&sim->namesakes[(e - sim->engines) % SIM_SIDE_MAX];

	return e->source && namesake->session ? namesake : NULL;
}

static void namesake_joins(struct sim *sim, unsigned int i)
{
	struct sim_engine *e = &sim->engines[i];
	struct sim_namesake *namesake = &sim->namesakes[i];

	if (!e->source || !sim_has_namesakes(sim->script))
		return;
	namesake->session = cluster_engine(&sim->c, sim->at[e->place], "namesake");
	namesake->cache = e->cache;
	cluster_cache(&sim->c, namesake->session, "src", i, &namesake->cache);
	memset(namesake->cache.base, 0xee, namesake->cache.bytes);
}

/* What its engine opens, of its own pages. What is left of an earlier room of the number
 * goes, or keeps its place. */
static void namesake_opens(struct sim *sim, const struct sim_request *req,
			   const struct sim_side *side, const char *members)
{
	struct sim_namesake *namesake = namesake_of(sim, side->engine);

	if (!namesake)
		return;
	for (unsigned int i = 0; i < 2; i++)
		sim_answered_ok(
			cluster_call(&sim->c, namesake->session,
				     "{'cmd':'room.%s','room':'%llu','role':'%s'}",
				     i ? "close" : "abort",
				     (unsigned long long)req->number, side->role));
	sim_answered_ok(cluster_call(&sim->c, namesake->session,
				     "{'cmd':'room.open','room':'%llu','role':'%s',"
				     "'pool':%llu%s}",
				     (unsigned long long)req->number, side->role,
				     (unsigned long long)namesake->cache.pool, members));
}

static void engine_joins(struct sim *sim, unsigned int i)
{
	struct sim_engine *e = &sim->engines[i];
	void *page;

	/* an engine whose registration is refused tries again until it is not */
	mem_fail_at(0);
	offload_hold(sim_kvd(sim, e->place)->offload, false);
	if (sim->script->seed % 2)
		namesake_joins(sim, i);
	e->session = cluster_engine(&sim->c, sim->at[e->place],
				    e->source ? "prefill" : "decode");
	cluster_cache(&sim->c, e->session, e->source ? "src" : "dst", i % SIM_SIDE_MAX,
		      &e->cache);
	e->epoch = e->session->epoch;
	if (sim->script->seed % 2 == 0)
		namesake_joins(sim, i);
	page = mmap(NULL, PAGE_BYTES, PROT_READ, MAP_SHARED,
		    status_page_fd(e->session->status), 0);
	assert_ptr_not_equal(page, MAP_FAILED);
	e->page = page;
	e->alive = true;
}

static void engine_starts(struct sim *sim, unsigned int i)
{
	struct sim_engine *e = &sim->engines[i];

	e->pages_used = e->aux_used = 0;
	engine_joins(sim, i);
	e->shadow = malloc(e->cache.bytes);
	assert_non_null(e->shadow);
	for (uint64_t b = 0; b < e->cache.bytes; b++)
		e->cache.base[b] = (uint8_t)(b * 37 + i);
	memcpy(e->shadow, e->cache.base, e->cache.bytes);
}

/* The engine's rooms are over, for it: its session or its daemon is gone. */
static void engine_leaves(struct sim *sim, struct sim_engine *e)
{
	sim_check_engine(sim, e);
	for (unsigned int r = 0; r < SIM_REQUESTS_MAX; r++) {
		struct sim_request *req = &sim->requests[r];

		for (unsigned int s = 0; s < SIM_ENGINES_MAX; s++) {
			struct sim_side *side = &req->sides[s];

			if (!req->used || side->engine != e)
				continue;
			/* its tombstone, too, went with its pool */
			side->orphaned = true;
			if (side->gone)
				continue;
			req->stopped = true;
			if (!side->ended)
				side->ended_ns = now_of(sim);
			side->ended = side->gone = true;
		}
	}
	e->alive = false;
	free(e->shadow);
	munmap((void *)(uintptr_t)e->page, PAGE_BYTES);
	assert_true(sim->grave_count < SIM_GRAVES_MAX);
	sim->graves[sim->grave_count++] = e->cache; /* the daemon may still write to it */
	if (namesake_of(sim, e)) {
		assert_true(sim->grave_count < SIM_GRAVES_MAX);
		sim->graves[sim->grave_count++] = namesake_of(sim, e)->cache;
	}
}

static void engine_dies(struct sim *sim, struct sim_engine *e)
{
	struct sim_namesake *namesake = namesake_of(sim, e);

	engine_leaves(sim, e);
	cluster_engine_dies(&sim->c, e->session);
	if (namesake)
		cluster_engine_dies(&sim->c, namesake->session);
}

static void engines_begin(struct sim *sim, struct sim_draw *d)
{
	for (unsigned int i = 0; i < SIM_ENGINES_MAX; i++) {
		struct sim_engine *e = &sim->engines[i];
		bool source = i < SIM_SIDE_MAX;
		unsigned int ranks = sim_side_count(sim, source), rank = i % SIM_SIDE_MAX;

		if (rank >= ranks)
			continue;
		e->exists = true;
		e->source = source;
		/* sources first, sinks last; sometimes anywhere */
		e->place = source ? rank % sim->script->places
				  : sim->script->places - 1 - rank % sim->script->places;
		if (sim_chance(d, 25))
			e->place = sim_below(d, sim->script->places);
		e->cache = (struct cache){.layers = 2,
					  .page_tokens = 2u << sim_below(d, 3),
					  .units = 4 / ranks,
					  .first_unit = rank * (4 / ranks),
					  .total_units = 4,
					  .unit_bytes = 8,
					  .aux_slots = 8,
					  .aux_bytes = 16};
		e->cache.pages = SIM_TOKENS / e->cache.page_tokens;
		engine_starts(sim, i);
	}
}

static void life_or_death(struct sim *sim, struct sim_draw *d)
{
	unsigned int i = sim_below(d, SIM_ENGINES_MAX);
	struct sim_engine *e = &sim->engines[i];

	for (unsigned int n = 0; n < SIM_ENGINES_MAX && !e->exists; n++)
		e = &sim->engines[i = (i + 1) % SIM_ENGINES_MAX];
	if (e->alive && sim->grave_count + 2 * SIM_ENGINES_MAX < SIM_GRAVES_MAX)
		engine_dies(sim, e);
	if (!e->alive && sim_chance(d, 70))
		engine_starts(sim, i);
}

static void pool_again(struct sim *sim, struct sim_draw *d)
{
	struct sim_engine *e = &sim->engines[sim_below(d, SIM_ENGINES_MAX)];

	if (!e->alive)
		return;
	if (!sim_answered_ok(cluster_call(&sim->c, e->session,
					  "{'cmd':'pool.unregister','pool':%llu}",
					  (unsigned long long)e->cache.pool)))
		return;	     /* in use */
	engine_dies(sim, e); /* its session goes with it: the simplest way back */
	engine_starts(sim, (unsigned int)(e - sim->engines));
}

static void crash(struct sim *sim, struct sim_draw *d)
{
	unsigned int place = sim_below(d, sim->script->places), dead = sim->at[place];
	enum mem_crash how = sim_chance(d, 70) ? MEM_CRASH_KILLED : MEM_CRASH_POWER;

	if (sim->c.count >= CLUSTER_NODES_MAX ||
	    sim->grave_count + 2 * SIM_ENGINES_MAX >= SIM_GRAVES_MAX)
		return;
	for (unsigned int i = 0; i < SIM_ENGINES_MAX; i++) {
		if (sim->engines[i].alive && sim->engines[i].place == place)
			engine_leaves(sim, &sim->engines[i]);
	}
	sim_ask_place_dies(sim, place);
	cluster_crash(&sim->c, dead, how);
	offload_hold(sim->c.nodes[dead].kvd.offload, false); /* they die with it */
	let_run(sim, (uint64_t)sim_below(d, 1500) * SIM_MS + 1);
	sim->at[place] = cluster_restart(&sim->c, dead);
	sim->c.nodes[sim->at[place]].config = sim->c.nodes[dead].config;
	for (unsigned int i = 0; i < SIM_ENGINES_MAX; i++) {
		if (sim->engines[i].exists && sim->engines[i].place == place)
			engine_starts(sim, i);
	}
	sim_ask_place_comes(sim, place);
}

/* ---- requests ---- */

static bool take_pages(struct sim_draw *d, struct sim_side *side, unsigned int tokens)
{
	struct sim_engine *e = side->engine;
	unsigned int used = (unsigned int)__builtin_popcount(e->pages_used);
	unsigned int pt = e->cache.page_tokens;

	side->page_count = (tokens + pt - 1) / pt;
	if (side->page_count > e->cache.pages - used || e->aux_used == 0xff)
		return false;
	for (unsigned int i = 0; i < side->page_count; i++) {
		do
			side->pages[i] = sim_below(d, e->cache.pages);
		while (e->pages_used >> side->pages[i] & 1);
		e->pages_used |= 1u << side->pages[i];
	}
	do
		side->aux = sim_below(d, 8);
	while (e->aux_used >> side->aux & 1);
	e->aux_used |= 1u << side->aux;
	return true;
}

static void give_pages(struct sim_side *side)
{
	for (unsigned int i = 0; i < side->page_count; i++)
		side->engine->pages_used &= ~(1u << side->pages[i]);
	side->engine->aux_used &= ~(1u << side->aux);
	side->gone = true;
}

static void cut_chunks(struct sim_draw *d, struct sim_request *req)
{
	req->chunks = 1 + sim_below(d, SIM_CHUNKS_MAX);
	if (req->chunks > req->tokens)
		req->chunks = req->tokens;
	for (unsigned int i = 0; i <= req->chunks; i++)
		req->cut[i] = req->tokens * i / req->chunks;
	for (unsigned int i = 0; i < req->chunks; i++) {
		unsigned int k = sim_below(d, i + 1);

		req->order[i] = req->order[k];
		req->order[k] = i;
	}
}

static struct sim_request *free_request(struct sim *sim)
{
	struct sim_request *req = NULL;

	for (unsigned int r = 0; r < SIM_REQUESTS_MAX; r++)
		req = sim->requests[r].used ? req : &sim->requests[r];
	for (unsigned int i = 0; i < SIM_ENGINES_MAX; i++) {
		if (sim->engines[i].exists && !sim->engines[i].alive)
			return NULL; /* the router sees that an instance is not there */
	}
	return req;
}

static void request_begins(struct sim *sim, struct sim_draw *d)
{
	struct sim_request *req = free_request(sim);

	if (!req)
		return;
	*req = (struct sim_request){0};
	/* half of the numbers come back: messages of the past meet new rooms */
	req->number = 1000 + (uint64_t)(req - sim->requests);
	req->fresh = sim_chance(d, 50);
	if (req->fresh)
		req->number = ++sim->next_number;
	req->key = sim_next(d);
	req->pull = sim_chance(d, 45);
	req->late = req->pull && sim_chance(d, 50);
	req->told = req->pull && sim_chance(d, 30);
	req->tokens = 1 + sim_below(d, 20);
	req->prefix = sim_chance(d, 30) ? sim_below(d, req->tokens) : 0;
	req->troubles = sim_troubles(sim);
	req->aborts = sim->aborts;
	cut_chunks(d, req);
	for (unsigned int i = 0; i < SIM_ENGINES_MAX; i++) {
		struct sim_side *side = &req->sides[i];
		bool source = i < SIM_SIDE_MAX;

		if (!sim->engines[i].alive)
			continue;
		side->engine = &sim->engines[i];
		side->role = source ? (req->pull ? "offer" : "send")
				    : (req->pull ? "pull" : "recv");
		if (!take_pages(d, side, req->tokens)) {
			side->engine = NULL;
			side->page_count = 0;
			req->stopped = true; /* this rank never comes */
			continue;
		}
		req->used = true;
		if (source)
			sim_fill(side, req, req->key);
	}
	req->misled = sim_past_misleads(sim, req->number);
	sim_totals->rooms += req->used;
}

/* "{'kv':{…}}" of tokens [begin, end). */
static const char *views(const struct sim_side *side, unsigned int begin,
			 unsigned int end, char *buf, size_t size)
{
	unsigned int pt = side->engine->cache.page_tokens, first = begin / pt;
	size_t n = (size_t)snprintf(buf, size,
				    "{'kv':{'first_token':%u,'tokens':[%u,%u],"
				    "'pages':[",
				    first * pt, begin, end);

	for (unsigned int i = first; i * pt < end; i++)
		n += (size_t)snprintf(buf + n, size - n, "%s%u", i > first ? "," : "",
				      side->pages[i]);
	snprintf(buf + n, size - n, "]}}");
	return buf;
}

static const char *sources(struct sim *sim, char *buf, size_t size)
{
	size_t n = (size_t)snprintf(buf, size, "[");

	for (unsigned int i = 0; i < sim->script->sources; i++) {
		const struct sim_engine *e = &sim->engines[i];

		n += (size_t)snprintf(
			buf + n, size - n, "%s{'endpoint':'%s','pool':'src','rank':%u",
			i ? "," : "", sim->c.nodes[sim->at[e->place]].endpoint, i);
		if (sim_has_namesakes(sim->script))
			n += (size_t)snprintf(buf + n, size - n, ",'session':'%llu'",
					      (unsigned long long)e->epoch);
		n += (size_t)snprintf(buf + n, size - n, "}");
	}
	snprintf(buf + n, size - n, "]");
	return buf;
}

static void note_slot(struct sim_side *side, cJSON *answer)
{
	const char *gen = cJSON_GetStringValue(cJSON_GetObjectItem(answer, "gen"));
	const cJSON *slot = cJSON_GetObjectItem(answer, "slot");

	side->open = gen && cJSON_IsNumber(slot);
	if (side->open) {
		side->gen = (uint32_t)strtoul(gen, NULL, 10);
		side->slot = (uint32_t)slot->valuedouble;
		assert_true((side->slot + 2) * 64 <= PAGE_BYTES);
	}
	cJSON_Delete(answer);
}

static void side_opens(struct sim *sim, struct sim_request *req, struct sim_side *side)
{
	char text[1200] = "", pages[260], list[500];
	bool source = side->engine->source;
	size_t n = 0;

	if (req->pull && (source || !req->late))
		n = (size_t)snprintf(text, sizeof(text), ",'views':%s,'aux':%u",
				     views(side, source ? 0 : req->prefix, req->tokens,
					   pages, sizeof(pages)),
				     side->aux);
	if (!source)
		n += (size_t)snprintf(text + n, sizeof(text) - n, ",'sources':%s",
				      sources(sim, list, sizeof(list)));
	if (source && req->told)
		snprintf(text + n, sizeof(text) - n, ",'receivers_from_pullers':true");
	else if (source ? req->pull : !req->pull || req->told)
		snprintf(text + n, sizeof(text) - n, ",'receivers':%u",
			 sim->script->sinks);
	n = strlen(text);
	if (sim_has_ticket(req->number))
		snprintf(text + n, sizeof(text) - n, ",'ticket':'%032llx'",
			 (unsigned long long)req->number);
	if (source && req->key % 2)
		namesake_opens(sim, req, side, text);
	/* before: bytes may land at once */
	side->bound = req->pull && !source && !req->late;
	note_slot(side,
		  cluster_call(&sim->c, side->engine->session,
			       "{'cmd':'room.open','room':'%llu','role':'%s','pool':%llu"
			       "%s}",
			       (unsigned long long)req->number, side->role,
			       (unsigned long long)side->engine->cache.pool, text));
	if (source && req->key % 2 == 0)
		namesake_opens(sim, req, side, text);
	side->opened_ns = now_of(sim);
	if (!side->open) {
		side->bound = false;
		side->refused = req->stopped = true;
		side->ended = true;
		side->ended_ns = now_of(sim);
	}
}

static void side_binds(struct sim *sim, struct sim_request *req, struct sim_side *side)
{
	char pages[260];

	side->bound = true; /* before: what the command does may land at once */
	if (!sim_answered_ok(cluster_call(
		    &sim->c, side->engine->session,
		    "{'cmd':'room.bind','room':'%llu','role':'%s','views':%s,'aux':%u}",
		    (unsigned long long)req->number, side->role,
		    views(side, req->prefix, req->tokens, pages, sizeof(pages)),
		    side->aux))) {
		side->bound = false; /* it was failing already */
		req->stopped = true;
	}
}

static void side_sends(struct sim *sim, struct sim_request *req, struct sim_side *side,
		       unsigned int seq)
{
	char pages[260], tail[40] = "";
	unsigned int k = req->order[seq];

	if (seq + 1 == req->chunks)
		snprintf(tail, sizeof(tail), ",'last':true,'aux':%u", side->aux);
	sim_answered_ok(cluster_call(
		&sim->c, side->engine->session,
		"{'cmd':'room.send','room':'%llu','seq':%u,'views':%s%s}",
		(unsigned long long)req->number, seq,
		views(side, req->cut[k], req->cut[k + 1], pages, sizeof(pages)), tail));
}

/* The engine's next command of this request, if it has one. */
static void side_steps(struct sim *sim, struct sim_request *req, struct sim_side *side)
{
	if (side->gone || side->ended)
		return;
	if (!side->open)
		side_opens(sim, req, side);
	else if ((strcmp(side->role, "recv") == 0 ||
		  (req->late && !side->engine->source)) &&
		 side->steps == 1)
		side_binds(sim, req, side);
	else if (strcmp(side->role, "send") == 0 && side->steps <= req->chunks)
		side_sends(sim, req, side, side->steps - 1);
	else
		return;
	side->steps++;
	side->last_ns = now_of(sim);
}

static void sides_step(struct sim *sim, struct sim_request *req, struct sim_draw *d)
{
	unsigned int first = sim_below(d, SIM_ENGINES_MAX);
	unsigned int eager = 20 + sim_below(d, 80);

	for (unsigned int i = 0; i < SIM_ENGINES_MAX; i++) {
		struct sim_side *side = &req->sides[(first + i) % SIM_ENGINES_MAX];

		if (side->engine && side->engine->alive && sim_chance(d, eager))
			side_steps(sim, req, side);
		sim_observe(sim);
	}
}

static void side_closes(struct sim *sim, struct sim_request *req, struct sim_side *side)
{
	if (side->open && side->ended && !side->gone &&
	    !sim_answered_ok(
		    cluster_call(&sim->c, side->engine->session,
				 "{'cmd':'room.close','room':'%llu','role':'%s'}",
				 (unsigned long long)req->number, side->role)))
		return; /* no memory: later */
	give_pages(side);
}

static void request_closes(struct sim *sim, struct sim_request *req, struct sim_draw *d)
{
	bool left = false, begun = false;

	for (unsigned int s = 0; s < SIM_ENGINES_MAX; s++)
		begun |= req->sides[s].open || req->sides[s].refused;
	for (unsigned int s = 0; s < SIM_ENGINES_MAX; s++) {
		struct sim_side *side = &req->sides[s];

		if (!side->engine || side->gone)
			continue;
		if (begun && side->engine->alive &&
		    (side->open ? side->ended : req->stopped || sim_chance(d, 3))) {
			req->stopped |= !side->open;
			side_closes(sim, req, side);
		}
		left |= !side->gone;
	}
	req->used = left;
	if (!left) {
		sim_totals->troubled_rooms += sim_troubles(sim) > req->troubles;
		sim_totals->calm_rooms += sim->script->calm;
	}
}

static struct sim_request *any_request(struct sim *sim, struct sim_draw *d)
{
	unsigned int first = sim_below(d, SIM_REQUESTS_MAX);

	for (unsigned int i = 0; i < SIM_REQUESTS_MAX; i++) {
		struct sim_request *req = &sim->requests[(first + i) % SIM_REQUESTS_MAX];

		if (req->used)
			return req;
	}
	return NULL;
}

static struct sim_side *any_side(struct sim_request *req, struct sim_draw *d)
{
	unsigned int first = sim_below(d, SIM_ENGINES_MAX);

	for (unsigned int i = 0; i < SIM_ENGINES_MAX; i++) {
		struct sim_side *side = &req->sides[(first + i) % SIM_ENGINES_MAX];

		if (side->engine && side->open && !side->gone && side->engine->alive)
			return side;
	}
	return NULL;
}

static void abort_one(struct sim *sim, struct sim_request *req, struct sim_side *side)
{
	req->stopped = true;
	sim_answered_ok(cluster_call(&sim->c, side->engine->session,
				     "{'cmd':'room.abort','room':'%llu','role':'%s'}",
				     (unsigned long long)req->number, side->role));
}

/* ---- the run ---- */

static void act(struct sim *sim, const struct sim_event *event)
{
	struct sim_draw d = {event->draw};
	struct sim_request *req = any_request(sim, &d);
	struct sim_side *side = req ? any_side(req, &d) : NULL;

	/* memory is the daemons' to run out of, not the rig's */
	if (event->kind != SIM_STEP && event->kind != SIM_CLOSE &&
	    event->kind != SIM_ABORT && event->kind != SIM_AGAIN &&
	    event->kind != SIM_ROWS && event->kind != SIM_CHUNKS)
		mem_fail_at(0);
	switch (event->kind) {
	case SIM_REQUEST:
		request_begins(sim, &d);
		return;
	case SIM_STEP:
		if (req)
			sides_step(sim, req, &d);
		return;
	case SIM_CLOSE:
		if (req)
			request_closes(sim, req, &d);
		return;
	case SIM_AGAIN:
		if (side && strcmp(side->role, "send") == 0 && side->steps > 1)
			side_sends(sim, req, side, sim_below(&d, side->steps - 1));
		return;
	case SIM_ABORT:
		if (side)
			abort_one(sim, req, side);
		sim->aborts++;
		break;
	case SIM_STRANGER:
		sim_past_stranger(sim, &d);
		return;
	case SIM_ENGINE:
		life_or_death(sim, &d);
		break;
	case SIM_POOL:
		pool_again(sim, &d);
		break;
	case SIM_CRASH:
		sim->trouble_ns = UINT64_MAX;
		crash(sim, &d);
		sim->trouble_ns = now_of(sim);
		break;
	default:
		sim_trouble(sim, event);
		return;
	}
	sim->troubles++;
}

static void begin(struct sim *sim)
{
	struct sim_draw d = {sim->script->seed ^ 0xbe6117};

	cluster_new(&sim->c, sim->script->seed, sim->script->places);
	/* every third world: turns so short that what takes several does so */
	if (sim->script->seed % 3 == 0)
		loop_virtual_parts(sim->c.loop,
				   1 + (unsigned int)(sim->script->seed / 3 % 8));
	for (unsigned int i = 0; i < sim->c.count; i++) {
		struct config *config = &sim->c.nodes[i].config;
		bool calm = sim->script->calm;

		sim->at[i] = i;
		config->bootstrap_timeout_ns = (calm ? 60 : 3) * LOOP_NS_PER_S;
		config->waiting_timeout_ns = (calm ? 60 : 2) * LOOP_NS_PER_S;
		config->transfer_stall_timeout_ns = (calm ? 60 : 1) * LOOP_NS_PER_S;
		config->fence_timeout_ns = 300 * SIM_MS;
		config->lease_ns = (calm ? 60000 : 600) * SIM_MS;
		config->early_request_ttl_ns = 1500 * SIM_MS;
		/* every other world: as if two pages were thousands */
		if (sim->script->seed & 1)
			config->peer_part_bytes = 16;
	}
	sim->next_number = 5000;
	sim_ask_begin(sim);
	engines_begin(sim, &d);
}

static void end(struct sim *sim)
{
	for (unsigned int i = 0; i < SIM_ENGINES_MAX; i++) {
		if (sim->engines[i].alive)
			engine_dies(sim, &sim->engines[i]);
	}
	sim_ask_leave(sim);
	for (unsigned int r = 0; r < SIM_REQUESTS_MAX; r++)
		sim_totals->troubled_rooms +=
			sim->requests[r].used &&
			sim_troubles(sim) > sim->requests[r].troubles;
	cluster_run(&sim->c, 5 * LOOP_NS_PER_S);
	for (unsigned int p = 0; p < sim->script->places; p++) {
		/* a store has one of its own */
		if (sim_kvd(sim, p)->session_count != sim->script->asks ||
		    rooms_count(rooms_of(sim_kvd(sim, p))))
			sim_broken(sim,
				   "end: place %u still has %u sessions and %u rooms", p,
				   sim_kvd(sim, p)->session_count,
				   rooms_count(rooms_of(sim_kvd(sim, p))));
	}
	sim_ask_end(sim);
	cluster_free(&sim->c);
	sim_ask_bury(sim);
	for (unsigned int i = 0; i < sim->grave_count; i++)
		cache_close(&sim->graves[i]);
}

void sim_play(const struct sim_script *script)
{
	static struct sim sim;

	sim = (struct sim){.script = script};
	sim_past_begin(&sim);
	begin(&sim);
	for (unsigned int i = 0; i < script->count; i++) {
		const struct sim_event *event = &script->events[i];

		let_run(&sim, (uint64_t)event->after_us * 1000 + 1);
		act(&sim, event);
		sim_observe(&sim);
		sim_totals->kinds[event->kind]++;
		if (i % 8 == 0) {
			sim_check_memory(&sim);
			sim_ask_check_memory(&sim);
		}
	}
	sim_heal(&sim);
	let_run(&sim, script->calm ? CALM_END_NS : END_NS);
	sim_check_memory(&sim);
	sim_check_all_ended(&sim);
	sim_ask_check_memory(&sim);
	sim_ask_check_ended(&sim);
	sim_totals->virtual_ms += now_of(&sim) / SIM_MS;
	sim_past_end();
	end(&sim);
}
