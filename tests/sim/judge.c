/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The judge sees what an engine sees and what the script did, nothing else:
 * answers of commands, words of the status page, the engines' own memory.
 *
 *   still    A second copy of every cache says what it must hold. Bytes outside
 *            the pages of rooms that still run never differ from it, so those of
 *            a room that has ended do not either.
 *   all      Success of a receiver means that every bound byte is the pattern of
 *            this very request; of a failed room the pages that "landed" names
 *            are. Sources overwrite their pages the moment their room ends, so a
 *            byte that was read too late, or from the past, shows.
 *   confirm  A sender that succeeds has receivers that have succeeded.
 *   learn    A room whose partner has failed shows it within 1 s, with a reason.
 *            While lines are broken or daemons die nobody may be able to tell it:
 *            then its own clock does (waiting_timeout, 2 s here, and its rounding).
 *            So it does where the partner of a number that is used again failed before
 *            it had heard of the room: that may have been the end of the one before.
 *   start    A receiver that has failed before it asked for anything ends the rooms
 *            of its sources as fast, also those that open a little later.
 *   end      Every room ends within a bound, and when nothing went wrong and all
 *            engines did their part, with success.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/hex.h"
#include "proto/kvd_status.h"
#include "tests/sim/sim.h"

#define LEARN_NS LOOP_NS_PER_S
#define ON_ITS_WAY_NS (50 * LOOP_NS_PER_MS) /* messages of a past room */
#define LEARN_LATE_NS (5 * LOOP_NS_PER_S / 2)

void sim_broken(const struct sim *sim, const char *fmt, ...)
{
	size_t n;
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(sim_totals->broken, sizeof(sim_totals->broken), fmt, ap);
	va_end(ap);
	n = strlen(sim_totals->broken);
	snprintf(sim_totals->broken + n, sizeof(sim_totals->broken) - n, " (at %.3f ms)",
		 (double)loop_now_ns(sim->c.loop) / 1e6);
	_exit(1);
}

/* ---- patterns ---- */

static uint8_t byte_of(uint64_t key, unsigned int layer, unsigned int field,
		       unsigned int token, unsigned int unit, unsigned int b)
{
	uint64_t z =
		key + ((((layer * 2ull + field) * 512 + token) * 64 + unit) * 64 + b);

	return (uint8_t)((z * UINT64_C(0x9e3779b97f4a7c15)) >> 56);
}

static uint8_t aux_of(uint64_t key, unsigned int b)
{
	return byte_of(key, 99, 0, 0, 0, b);
}

typedef bool visit_fn(uint8_t *at, uint8_t want);

static bool put(uint8_t *at, uint8_t want)
{
	*at = want;
	return true;
}

static bool same(uint8_t *at, uint8_t want)
{
	return *at == want;
}

/* Each byte of tokens [begin, end) of a side; false when a visit is. */
static bool visit_units(const struct sim_side *side, uint64_t key, unsigned int begin,
			unsigned int end, unsigned int first_unit, unsigned int units,
			visit_fn *fn)
{
	const struct cache *k = &side->engine->cache;

	for (unsigned int l = 0; l < k->layers; l++)
		for (unsigned int f = 0; f < 2; f++)
			for (unsigned int t = begin; t < end; t++) {
				uint8_t *at =
					cache_at(k, l, f, side->pages[t / k->page_tokens],
						 t % k->page_tokens, first_unit, 0);

				for (unsigned int i = 0; i < units * k->unit_bytes; i++)
					if (!fn(at + i,
						byte_of(key, l, f, t,
							first_unit + i / k->unit_bytes,
							i % k->unit_bytes)))
						return false;
			}
	return true;
}

static bool visit(const struct sim_side *side, uint64_t key, unsigned int begin,
		  unsigned int end, visit_fn *fn)
{
	return visit_units(side, key, begin, end, side->engine->cache.first_unit,
			   side->engine->cache.units, fn);
}

static bool visit_aux(const struct sim_side *side, uint64_t key, visit_fn *fn)
{
	const struct cache *k = &side->engine->cache;

	for (unsigned int b = 0; b < k->aux_bytes; b++) {
		if (!fn(cache_aux(k, side->aux) + b, aux_of(key, b)))
			return false;
	}
	return true;
}

void sim_fill(const struct sim_side *side, const struct sim_request *req, uint64_t key)
{
	visit(side, key, 0, req->tokens, put);
	visit_aux(side, key, put);
	memcpy(side->engine->shadow, side->engine->cache.base, side->engine->cache.bytes);
}

/* ---- still ---- */

static void copy_range(const struct sim_side *side, const struct sim_request *req,
		       uint8_t *to)
{
	const struct cache *k = &side->engine->cache;
	uint8_t *at;

	for (unsigned int l = 0; l < k->layers; l++)
		for (unsigned int f = 0; f < 2; f++)
			for (unsigned int t = req->prefix; t < req->tokens; t++) {
				at = cache_at(k, l, f, side->pages[t / k->page_tokens],
					      t % k->page_tokens, k->first_unit, 0);
				memcpy(to + (at - k->base), at, k->units * k->unit_bytes);
			}
	at = cache_aux(k, side->aux);
	memcpy(to + (at - k->base), at, k->aux_bytes);
}

void sim_check_engine(struct sim *sim, struct sim_engine *e)
{
	uint8_t allowed[16384];
	const uint8_t *want = e->shadow;

	if (memcmp(e->shadow, e->cache.base, e->cache.bytes) == 0)
		return;
	if (e->cache.bytes > sizeof(allowed))
		sim_broken(sim, "sim: a cache of %llu bytes",
			   (unsigned long long)e->cache.bytes);
	if (!e->source) {
		memcpy(allowed, e->shadow, e->cache.bytes);
		want = allowed;
	}
	for (unsigned int r = 0; r < SIM_REQUESTS_MAX && !e->source; r++) {
		const struct sim_request *req = &sim->requests[r];

		for (unsigned int s = 0; req->used && s < SIM_ENGINES_MAX; s++) {
			if (req->sides[s].engine == e && req->sides[s].bound &&
			    !req->sides[s].ended)
				copy_range(&req->sides[s], req, allowed);
		}
	}
	for (uint64_t i = 0; i < e->cache.bytes; i++) {
		if (want[i] != e->cache.base[i])
			sim_broken(sim,
				   "still: %s engine at place %u: byte %llu changed "
				   "outside of running rooms",
				   e->source ? "source" : "sink", e->place,
				   (unsigned long long)i);
	}
}

void sim_check_memory(struct sim *sim)
{
	for (unsigned int i = 0; i < SIM_ENGINES_MAX; i++) {
		if (sim->engines[i].alive)
			sim_check_engine(sim, &sim->engines[i]);
	}
}

/* ---- all ---- */

static void check_landed(struct sim *sim, const struct sim_request *req,
			 const struct sim_side *side, const cJSON *record)
{
	unsigned int pt = side->engine->cache.page_tokens;
	const cJSON *landed = cJSON_GetObjectItem(record, "landed");
	const char *kv = cJSON_GetStringValue(cJSON_GetObjectItem(landed, "kv"));
	const char *aux = cJSON_GetStringValue(cJSON_GetObjectItem(landed, "aux"));
	uint8_t byte;

	/* bit 0 is the first page of the list that was bound */
	for (unsigned int i = 0, first = req->prefix / pt;
	     kv && first + i < side->page_count; i++) {
		unsigned int begin = (first + i) * pt, end = begin + pt;

		begin = begin < req->prefix ? req->prefix : begin;
		end = end > req->tokens ? req->tokens : end;
		if (!hex_read(kv + 2ul * (i / 8), &byte, 1))
			sim_broken(sim, "landed: '%s' is too short", kv);
		if (begin < end && (byte >> (i % 8) & 1) &&
		    !visit(side, req->key, begin, end, same))
			sim_broken(
				sim,
				"landed: %s room %llu: page %u is not whole, as is said",
				side->role, (unsigned long long)req->number, i);
	}
	if (aux && strcmp(aux, "01") == 0 && !visit_aux(side, req->key, same))
		sim_broken(sim, "landed: %s room %llu: aux is not whole, as is said",
			   side->role, (unsigned long long)req->number);
}

static void check_failed(struct sim *sim, const struct sim_request *req,
			 const struct sim_side *side)
{
	cJSON *record = cluster_call(&sim->c, side->engine->session,
				     "{'cmd':'room.show','room':'%llu','role':'%s'}",
				     (unsigned long long)req->number, side->role);
	const cJSON *error = cJSON_GetObjectItem(record, "error");
	const char *why = cJSON_GetStringValue(cJSON_GetObjectItem(error, "message"));

	/* the command itself may have failed, of memory */
	if (cJSON_GetObjectItem(record, "state_name")) {
		if (!why || !*why)
			sim_broken(sim, "learn: %s room %llu failed without a reason",
				   side->role, (unsigned long long)req->number);
		if (why && strstr(why, SIM_STRANGERS_WORDS))
			sim_broken(sim, "admit: %s room %llu was failed by a stranger",
				   side->role, (unsigned long long)req->number);
		if (side->bound && !req->lied)
			check_landed(sim, req, side, record);
	}
	cJSON_Delete(record);
}

/* Does this source hold heads that the receiver wants? */
static bool serves(const struct cache *from, const struct cache *to)
{
	return from->first_unit < to->first_unit + to->units &&
	       to->first_unit < from->first_unit + from->units;
}

/* Those whom it served have said that they have everything. */
static void check_confirmed(struct sim *sim, const struct sim_request *req,
			    const struct sim_engine *sender)
{
	if (req->pull) /* an offerer only knows that the bytes were read */
		return;
	for (unsigned int s = 0; s < SIM_ENGINES_MAX; s++) {
		const struct sim_side *other = &req->sides[s];

		if (other->engine && !other->engine->source && !other->success &&
		    serves(&sender->cache, &other->engine->cache) &&
		    (other->ended ? !other->gone : other->open))
			sim_broken(sim,
				   "confirm: send room %llu succeeded, a receiver has "
				   "not",
				   (unsigned long long)req->number);
	}
}

static void on_ended(struct sim *sim, struct sim_request *req, struct sim_side *side,
		     bool success)
{
	struct sim_engine *e = side->engine;

	side->ended = true;
	side->success = success;
	side->ended_ns = loop_now_ns(sim->c.loop);
	sim_totals->sides_succeeded += success;
	sim_totals->sides_failed += !success;
	if (e->source) {
		sim_check_engine(sim, e);
		if (success && !req->lied && !req->misled)
			check_confirmed(sim, req, e);
		/* its pages are free: what is read from now on is garbage */
		sim_fill(side, req, req->key ^ UINT64_C(0x5555555555555555));
	} else {
		if (side->bound)
			copy_range(side, req, e->shadow);
		sim_check_engine(sim, e);
		if (success && !req->lied &&
		    (!visit(side, req->key, req->prefix, req->tokens, same) ||
		     !visit_aux(side, req->key, same)))
			sim_broken(sim, "all: %s room %llu succeeded without its bytes",
				   side->role, (unsigned long long)req->number);
	}
	if (!success)
		check_failed(sim, req, side);
}

/* ---- learn ---- */

static uint64_t patience(const struct sim *sim, const struct sim_request *req,
			 const struct sim_side *side, const struct sim_side *other)
{
	uint64_t now = loop_now_ns(sim->c.loop);

	/* what it asks may arrive after the end: of a number that is used again, it may
	 * be for the next room */
	if (!req->fresh && strcmp(side->role, "recv") == 0 &&
	    other->ended_ns <= side->last_ns + ON_ITS_WAY_NS)
		return LEARN_LATE_NS;

	/* whoever died before it was asked is missed when the question has waited
	 * in vain at who came in its place */
	if (other->orphaned || sim->trouble_ns == UINT64_MAX ||
	    now < sim->trouble_ns + LEARN_LATE_NS)
		return LEARN_LATE_NS;
	return LEARN_NS;
}

/* A receiver to which every byte of this source's heads has come already. */
static bool has_all_of(const struct sim_request *req, const struct sim_side *side,
		       const struct sim_side *source)
{
	const struct cache *to = &side->engine->cache, *from = &source->engine->cache;
	unsigned int first =
		to->first_unit > from->first_unit ? to->first_unit : from->first_unit;
	unsigned int end = to->first_unit + to->units < from->first_unit + from->units
				   ? to->first_unit + to->units
				   : from->first_unit + from->units;

	return !side->engine->source && side->bound &&
	       visit_units(side, req->key, req->prefix, req->tokens, first, end - first,
			   same);
}

/* For whoever looks for the cause (SIM_SHOW=1). */
static void show(struct sim *sim, const struct sim_request *req)
{
	for (unsigned int s = 0; s < SIM_ENGINES_MAX; s++) {
		const struct sim_side *side = &req->sides[s];
		cJSON *record;
		char *text;

		if (!side->engine || !side->open || side->gone)
			continue;
		record = cluster_call(&sim->c, side->engine->session,
				      "{'cmd':'room.show','room':'%llu','role':'%s'}",
				      (unsigned long long)req->number, side->role);
		text = cJSON_Print(record);
		printf("place %u: %s\n", side->engine->place, text);
		cJSON_free(text);
		cJSON_Delete(record);
		record = cluster_call(&sim->c, side->engine->session,
				      "{'cmd':'peer.list'}");
		text = cJSON_Print(record);
		printf("peers of place %u: %s\n", side->engine->place, text);
		cJSON_free(text);
		cJSON_Delete(record);
	}
	fflush(stdout);
}

static cJSON *room_of(struct sim *sim, const struct sim_request *req,
		      const struct sim_side *side)
{
	return cluster_call(&sim->c, side->engine->session,
			    "{'cmd':'room.show','room':'%llu','role':'%s'}",
			    (unsigned long long)req->number, side->role);
}

/* The sender had an earlier room of this receiver and number, one that its engine gave
 * up. Whether the receiver's present room belongs to it or to the next sender of the
 * number, nobody can tell: it waits. */
static bool had_an_earlier_one(struct sim *sim, const struct sim_request *req,
			       const struct sim_side *side, const struct sim_side *other)
{
	const double rank = (double)((side->engine - sim->engines) % SIM_SIDE_MAX);
	cJSON *mine, *theirs;
	const cJSON *peer;
	const char *generation;
	bool earlier = false, present = false;

	if (req->fresh || strcmp(side->role, "recv") != 0 || side->gone || other->gone)
		return false;
	mine = room_of(sim, req, side);
	theirs = room_of(sim, req, other);
	generation = cJSON_GetStringValue(cJSON_GetObjectItem(mine, "generation"));
	cJSON_ArrayForEach(peer, cJSON_GetObjectItem(theirs, "peers")) {
		const char *there =
			cJSON_GetStringValue(cJSON_GetObjectItem(peer, "generation"));

		if (cJSON_GetNumberValue(cJSON_GetObjectItem(peer, "rank")) != rank)
			continue;
		if (generation && there && strcmp(generation, there) == 0)
			present = true;
		else
			earlier = true;
	}
	earlier = earlier && generation && !present;
	cJSON_Delete(mine);
	cJSON_Delete(theirs);
	return earlier;
}

/* A partner that has been heard of and failed must be noticed, unless nothing was
 * wanted of it any more. */
static void check_partners(struct sim *sim, const struct sim_request *req,
			   struct sim_side *side, unsigned int state)
{
	uint64_t now = loop_now_ns(sim->c.loop);

	if (state == KVD_BOOTSTRAPPING)
		side->last_ns = now;
	if (state == KVD_BOOTSTRAPPING || strcmp(side->role, "offer") == 0 ||
	    (strcmp(side->role, "recv") == 0 && !side->bound))
		return;
	for (unsigned int s = 0; s < SIM_ENGINES_MAX; s++) {
		const struct sim_side *other = &req->sides[s];
		uint64_t since =
			other->ended_ns > side->last_ns ? other->ended_ns : side->last_ns;

		if (!other->engine || !other->ended || other->success || !other->open ||
		    other->engine->source == side->engine->source ||
		    !serves(&other->engine->cache, &side->engine->cache) ||
		    has_all_of(req, side, other))
			continue; /* that one is not missed */
		if (now <= since + patience(sim, req, side, other) ||
		    had_an_earlier_one(sim, req, side, other))
			continue;
		if (getenv("SIM_SHOW"))
			show(sim, req);
		sim_broken(sim,
			   "learn: %s room %llu is in state %u, %s failed %llu "
			   "ms ago",
			   side->role, (unsigned long long)req->number, state,
			   other->role, (unsigned long long)((now - since) / SIM_MS));
	}
}

/* Has nothing happened to this request but that engines aborted rooms? A fault that was
 * drawn for a message before it began may have come to it. */
static bool only_aborts(const struct sim *sim, const struct sim_request *req,
			uint64_t since_ns)
{
	uint64_t fault_ns = fake_hub_stats(sim->c.bytes)->fault_ns;

	return (fault_ns == 0 || since_ns > fault_ns + LEARN_NS) &&
	       sim_troubles(sim) - req->troubles == sim->aborts - req->aborts &&
	       (sim->trouble_ns == 0 || (sim->trouble_ns != UINT64_MAX &&
					 since_ns > sim->trouble_ns + LEARN_LATE_NS));
}

/* A sender that waits for receivers: one of them has met its sources, and will not come.
 * Of a number that is used again, one that failed before the sender opened, or by a
 * message that was sent before, may have been another room's. */
static void check_start(struct sim *sim, const struct sim_request *req,
			const struct sim_side *side)
{
	uint64_t now = loop_now_ns(sim->c.loop);

	for (unsigned int s = SIM_SIDE_MAX; s < SIM_ENGINES_MAX; s++) {
		const struct sim_side *other = &req->sides[s];
		uint64_t since = other->ended_ns > side->opened_ns ? other->ended_ns
								   : side->opened_ns;

		if (!other->engine || !other->met || !other->ended || other->success ||
		    other->orphaned || !only_aborts(sim, req, other->ended_ns) ||
		    (side->opened_ns + ON_ITS_WAY_NS > other->ended_ns && !req->fresh) ||
		    side->opened_ns > other->ended_ns + LEARN_NS)
			continue;
		if (now > since + LEARN_NS && getenv("SIM_SHOW"))
			show(sim, req);
		if (now > since + LEARN_NS)
			sim_broken(sim,
				   "start: send room %llu waits for receivers, one "
				   "failed %llu ms ago",
				   (unsigned long long)req->number,
				   (unsigned long long)((now - since) / SIM_MS));
	}
}

static void look(struct sim *sim, struct sim_request *req, struct sim_side *side)
{
	const struct kvd_status_slot *slots =
		(const void *)(side->engine->page + KVD_STATUS_SLOT_BYTES);
	uint64_t word = __atomic_load_n(&slots[side->slot].word, __ATOMIC_ACQUIRE);
	unsigned int state = kvd_word_state(word);

	if (kvd_word_gen(word) != side->gen)
		sim_broken(sim, "still: the slot of %s room %llu shows another object",
			   side->role, (unsigned long long)req->number);
	if (state == KVD_WAITING_FOR_INPUT && strcmp(side->role, "recv") == 0)
		side->met = true;
	if (state == KVD_BOOTSTRAPPING && strcmp(side->role, "send") == 0 && !req->lied &&
	    !req->misled)
		check_start(sim, req, side);
	if (state == KVD_SUCCESS || state == KVD_FAILED)
		on_ended(sim, req, side, state == KVD_SUCCESS);
	else if (!(kvd_word_flags(word) & KVD_FLAG_ABORTING) && !req->lied &&
		 !req->misled)
		check_partners(sim, req, side, state);
}

void sim_observe(struct sim *sim)
{
	sim_ask_observe(sim);
	for (unsigned int r = 0; r < SIM_REQUESTS_MAX; r++) {
		struct sim_request *req = &sim->requests[r];

		/* receivers first: in one turn of the loop theirs comes first */
		for (unsigned int s = SIM_ENGINES_MAX; req->used && s-- > 0;) {
			struct sim_side *side = &req->sides[s];

			if (side->open && !side->ended && side->engine->alive)
				look(sim, req, side);
		}
	}
}

/* ---- end ---- */

static bool all_did_their_part(const struct sim_request *req)
{
	for (unsigned int s = 0; s < SIM_ENGINES_MAX; s++) {
		const struct sim_side *side = &req->sides[s];
		unsigned int steps = s < SIM_SIDE_MAX ? (req->pull ? 1 : 1 + req->chunks)
				     : req->pull && !req->late ? 1
							       : 2;

		if (side->engine && (!side->open || side->steps < steps))
			return false;
	}
	return !req->stopped;
}

void sim_check_all_ended(struct sim *sim)
{
	for (unsigned int r = 0; r < SIM_REQUESTS_MAX; r++) {
		const struct sim_request *req = &sim->requests[r];

		for (unsigned int s = 0; req->used && s < SIM_ENGINES_MAX; s++) {
			const struct sim_side *side = &req->sides[s];

			if (side->open && !side->ended &&
			    (!sim->script->calm || all_did_their_part(req)))
				sim_broken(sim, "end: %s room %llu never ends",
					   side->role, (unsigned long long)req->number);
			if (sim->script->calm && side->ended && !side->success &&
			    all_did_their_part(req))
				sim_broken(sim,
					   "end: %s room %llu failed, and nothing had "
					   "gone wrong",
					   side->role, (unsigned long long)req->number);
		}
	}
}
