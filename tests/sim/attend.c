/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Askers. Each has all chunks in its cache, and of these it puts some; what it holds and
 * has not put is another place's. A post's rows are drawn, and its seat is the engine's
 * again as far as q goes once the word says so: then q is scribbled over.
 *
 * Kernels have helpers of their own, which may take their time without anything else of
 * the daemon waiting.
 */
#include "tests/sim/attend.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/loop/offload.h"
#include "daemon/math/value.h"
#include "tests/lib/cluster_store.h"
#include "tests/lib/file.h"
#include "tests/lib/ring_entries.h"

const bool sim_asks_built = true;

#define STORE_BYTES (1u << 20)

struct asks asks;

static uint64_t now_of(const struct sim *sim)
{
	return loop_now_ns(sim->c.loop);
}

static unsigned long long number(cJSON *answer, const char *name)
{
	const cJSON *n = cJSON_GetObjectItem(answer, name);
	unsigned long long value =
		cJSON_IsNumber(n) ? (unsigned long long)n->valuedouble : 0;

	cJSON_Delete(answer);
	return value;
}

/* ---- places ---- */

static void place_stores(struct sim *sim, unsigned int place)
{
	unsigned int node = sim->at[place];
	struct cluster_store_args args = {.memory_bytes = STORE_BYTES,
					  .attention_threads = 1};
	char stores[sizeof(sim->c.nodes[0].config.chunk_peers)] = "";
	size_t n = 0;

	for (unsigned int p = 0; p < sim->script->places; p++) {
		if (p != place)
			n += (size_t)snprintf(stores + n, sizeof(stores) - n, "%s%s",
					      n ? " " : "",
					      sim->c.nodes[sim->at[p]].endpoint);
	}
	strcpy(sim->c.nodes[node].config.attention_isa, "vector");
	assert_int_equal(offload_new_inline(sim->c.loop, &asks.kernels[node]), 0);
	args.stores = stores;
	args.kernels = asks.kernels[node];
	cluster_store(&sim->c, node, &args);
}

static void kernels_hold(struct sim *sim, unsigned int place, bool hold)
{
	unsigned int node = sim->at[place];

	if (asks.held[node] == hold)
		return;
	asks.held[node] = hold;
	asks.holds[node]++;
	offload_hold(asks.kernels[node], hold);
}

void sim_ask_heal(struct sim *sim)
{
	for (unsigned int p = 0; sim->script->asks && p < sim->script->places; p++)
		kernels_hold(sim, p, false);
}

/* ---- requesters ---- */

static void cache_fill(struct cache *cache)
{
	for (unsigned int i = 0; i < ASK_IDS * ASK_CHUNK; i++)
		for (unsigned int l = 0; l < ASK_LAYERS; l++)
			for (unsigned int f = 0; f < 2; f++)
				for (unsigned int n = 0; n < ASK_KV_HEADS * ASK_DIMS;
				     n++) {
					unsigned int head = n / ASK_DIMS,
						     d = n % ASK_DIMS;
					uint16_t value =
						ask_value(i / ASK_CHUNK, l, f,
							  i % ASK_CHUNK, head, d);

					memcpy(cache_at(cache, l, f, i / ASK_PAGE,
							i % ASK_PAGE, head, 2 * d),
					       &value, sizeof(value));
				}
}

static void seats_register(struct sim *sim, struct requester *a)
{
	char text[200];

	snprintf(text, sizeof(text),
		 "{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,"
		 "\"length\":%llu,\"address\":\"%llu\"}",
		 (unsigned long long)a->seats.bytes,
		 (unsigned long long)(uintptr_t)a->seats.base);
	a->region =
		number(cluster_call_fd(&sim->c, a->session, dup(a->seats.fd), NULL, text),
		       "region");
	assert_true(a->region != 0);
}

static void seats_open(struct sim *sim, struct requester *a)
{
	static const char *const names[] = {"attend", "seat_bytes", "q",     "o",
					    "m",      "l",	    "ready", "done"};
	uint64_t *const to[] = {&a->attend, &a->seat_bytes, &a->q,     &a->o,
				&a->m,	    &a->l,	    &a->ready, &a->done};
	cJSON *answer = cluster_call(
		&sim->c, a->session,
		"{'cmd':'attention.open','region':%llu,'rows':%u,'seats':%u,'kind':'gqa',"
		"'q_type':'bf16','kv_type':'bf16','heads':%u,'kv_heads':%u,'dqk':%u,"
		"'dv':%u,'scale':%g,'key':'k','value':'v','rope':{'first':0,'dims':4,"
		"'pairs':'halves','inv_freq':[%g,%g]},'out_type':'%s'}",
		(unsigned long long)a->region, ASK_ROWS, ASK_SEATS, ASK_HEADS,
		ASK_KV_HEADS, ASK_DIMS, ASK_DIMS, (double)ASK_SCALE, ask_inv_freq(0),
		ask_inv_freq(1), ask_out_bf16(a) ? "bf16" : "fp32");

	for (size_t i = 0; i < ARRAY_LEN(names); i++) {
		const cJSON *n = cJSON_GetObjectItem(answer, names[i]);

		if (!n)
			sim_broken(sim, "sim: %s", cJSON_PrintUnformatted(answer));
		*to[i] = (uint64_t)n->valuedouble;
	}
	cJSON_Delete(answer);
	assert_true(a->seat_bytes * ASK_SEATS <= a->seats.bytes);
}

static void seats_new(struct ask_seats *seats)
{
	seats->bytes = 4 * 4096;
	seats->fd = memfd_create("seats", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert_true(seats->fd >= 0 && file_fill(seats->fd, seats->bytes) == 0);
	seats->base = mmap(NULL, seats->bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
			   seats->fd, 0);
	assert_ptr_not_equal(seats->base, MAP_FAILED);
	memset(seats->base, 0xa5, seats->bytes);
	seats->shadow = malloc(seats->bytes);
	assert_non_null(seats->shadow);
	memcpy(seats->shadow, seats->base, seats->bytes);
}

static void seats_free(struct ask_seats *seats)
{
	munmap(seats->base, seats->bytes);
	close(seats->fd);
	free(seats->shadow);
}

/* An engine whose registration is refused tries again until it is not. */
static void requester_joins(struct sim *sim, unsigned int place)
{
	struct requester *a = &asks.requesters[place];

	mem_fail_at(0);
	offload_hold(sim_kvd(sim, place)->offload, false);
	*a = (struct requester){.place = place};
	a->session = cluster_engine(&sim->c, sim->at[place], "requester");
	a->cache = (struct cache){.layers = ASK_LAYERS,
				  .pages = ASK_IDS * ASK_CHUNK / ASK_PAGE,
				  .page_tokens = ASK_PAGE,
				  .units = ASK_KV_HEADS,
				  .total_units = ASK_KV_HEADS,
				  .unit_bytes = 2 * ASK_DIMS};
	cluster_cache(&sim->c, a->session, "kv", 0, &a->cache);
	cache_fill(&a->cache);
	a->space = number(cluster_call(&sim->c, a->session,
				       "{'cmd':'space.open','pool':%llu,'model':'m',"
				       "'scheme':'s','tokens':%u}",
				       (unsigned long long)a->cache.pool, ASK_CHUNK),
			  "space");
	assert_true(a->space != 0);
	seats_new(&a->seats);
	seats_register(sim, a);
	seats_open(sim, a);
	a->alive = true;
}

/* Its posts are over, for it. */
static void requester_leaves(struct sim *sim, struct requester *a)
{
	ask_judge_seats(sim, &a->seats, "a requester");
	a->alive = false;
	for (unsigned int s = 0; s < ASK_SEATS; s++) {
		a->seats.told[s].at = s * a->seat_bytes + a->done;
		a->seats.told[s].value = a->posts[s].live ? a->posts[s].value : 0;
	}
	assert_true(asks.grave_count < ASK_GRAVES);
	asks.caches[asks.grave_count] = a->cache;
	asks.graves[asks.grave_count++] = a->seats;
}

static void requester_dies(struct sim *sim, struct requester *a)
{
	requester_leaves(sim, a);
	cluster_engine_dies(&sim->c, a->session);
}

/* One for each place is to stay free: its daemon may die. */
static bool graves_have_room(const struct sim *sim)
{
	return asks.grave_count + CLUSTER_NODES_MAX + sim->script->places < ASK_GRAVES;
}

void sim_ask_place_dies(struct sim *sim, unsigned int place)
{
	if (!sim->script->asks)
		return;
	requester_leaves(sim, &asks.requesters[place]);
	kernels_hold(sim, place, false); /* they die with it */
}

void sim_ask_place_comes(struct sim *sim, unsigned int place)
{
	if (!sim->script->asks)
		return;
	place_stores(sim, place);
	requester_joins(sim, place);
}

/* ---- chunks ---- */

static const char *ids_text(unsigned int first, unsigned int count, char *buf,
			    size_t size)
{
	size_t n = (size_t)snprintf(buf, size, "'first':%u,'ids':[", first);

	for (unsigned int i = first; i < first + count; i++)
		n += (size_t)snprintf(buf + n, size - n, "%s'%064x'",
				      i > first ? "," : "", i + 1);
	snprintf(buf + n, size - n, "]");
	return buf;
}

static void run_draw(struct sim_draw *d, unsigned int *first_p, unsigned int *count_p)
{
	*first_p = sim_below(d, ASK_IDS);
	*count_p = 1 + sim_below(d, 4);
	if (*count_p > ASK_IDS - *first_p)
		*count_p = ASK_IDS - *first_p;
}

static void move_close(struct sim *sim, struct requester *a, unsigned int m)
{
	if (a->moves[m] &&
	    sim_answered_ok(cluster_call(&sim->c, a->session,
					 "{'cmd':'chunk.close','move':%llu}",
					 (unsigned long long)a->moves[m])))
		a->moves[m] = 0;
}

static void chunks_put(struct sim *sim, struct requester *a, struct sim_draw *d)
{
	unsigned int m = sim_below(d, ASK_MOVES), first, count,
		     per = ASK_CHUNK / ASK_PAGE;
	char ids[700], pages[200] = "";
	size_t n = 0;

	run_draw(d, &first, &count);
	move_close(sim, a, m);
	if (a->moves[m])
		return;
	for (unsigned int p = first * per; p < (first + count) * per; p++)
		n += (size_t)snprintf(pages + n, sizeof(pages) - n, "%s%u", n ? "," : "",
				      p);
	a->moves[m] = number(
		cluster_call(
			&sim->c, a->session,
			"{'cmd':'chunk.put','space':%llu,%s,'pool':%llu,'views':{'kv':"
			"{'first_token':%u,'pages':[%s],'tokens':[%u,%u]}}}",
			(unsigned long long)a->space,
			ids_text(first, count, ids, sizeof(ids)),
			(unsigned long long)a->cache.pool, first * ASK_CHUNK, pages,
			first * ASK_CHUNK, (first + count) * ASK_CHUNK),
		"move");
}

static bool hold_in_use(const struct requester *a, uint64_t hold)
{
	for (unsigned int s = 0; s < ASK_SEATS; s++) {
		const struct ask_post *post = &a->posts[s];

		for (unsigned int p = 0; post->live && p < post->part_count; p++) {
			if (post->parts[p].hold == hold)
				return true;
		}
	}
	return false;
}

static void chunks_hold(struct sim *sim, struct requester *a, struct sim_draw *d)
{
	struct ask_hold *hold = &a->holds[sim_below(d, ASK_HOLDS)];
	bool calm = sim->script->calm;
	unsigned int first, count;
	cJSON *answer;
	char ids[700];

	for (unsigned int i = 0; i < ASK_HOLDS; i++)
		hold = a->holds[i].count ? hold : &a->holds[i]; /* of no use as it is */
	run_draw(d, &first, &count);
	if (hold->id) {
		if ((calm && hold_in_use(a, hold->id)) ||
		    !sim_answered_ok(cluster_call(&sim->c, a->session,
						  "{'cmd':'chunk.release','hold':%llu}",
						  (unsigned long long)hold->id)))
			return;
		*hold = (struct ask_hold){0};
	}
	answer = cluster_call(
		&sim->c, a->session,
		"{'cmd':'chunk.hold','space':%llu,%s,'lease_ms':%u,'remote_ms':%u}",
		(unsigned long long)a->space, ids_text(first, count, ids, sizeof(ids)),
		calm || sim_chance(d, 60) ? 600000 : 20 + sim_below(d, 2000),
		5 + sim_below(d, 30));
	hold->first = first;
	hold->count = (unsigned int)number(cJSON_Duplicate(answer, true), "chunks");
	hold->id = number(answer, "hold");
}

static void chunks_drop(struct sim *sim, struct requester *a, struct sim_draw *d)
{
	unsigned int first, count;
	char ids[700];

	run_draw(d, &first, &count);
	sim_answered_ok(cluster_call(
		&sim->c, a->session, "{'cmd':'chunk.drop','space':%llu,%s}",
		(unsigned long long)a->space, ids_text(first, count, ids, sizeof(ids))));
}

/* Memory of chunks that rows may wait for is others' soon, if nothing keeps it. */
static void chunks_swap(struct sim *sim, struct requester *a, struct sim_draw *d)
{
	for (unsigned int i = 0; i < ASK_HOLDS; i++) {
		if (a->holds[i].id &&
		    sim_answered_ok(cluster_call(&sim->c, a->session,
						 "{'cmd':'chunk.release','hold':%llu}",
						 (unsigned long long)a->holds[i].id)))
			a->holds[i] = (struct ask_hold){0};
	}
	for (unsigned int i = 0; i < 4; i++) {
		chunks_drop(sim, a, d);
		chunks_put(sim, a, d);
	}
}

static void chunks_act(struct sim *sim, struct requester *a, struct sim_draw *d)
{
	unsigned int what = sim_below(d, 10);

	if (what < 4)
		chunks_put(sim, a, d);
	else if (what < 8 || sim->script->calm)
		chunks_hold(sim, a, d);
	else if (what < 9)
		chunks_drop(sim, a, d);
	else
		chunks_swap(sim, a, d);
}

/* ---- posts ---- */

static float value_draw(struct sim_draw *d)
{
	return (float)sim_below(d, 2001) / 1000 - 1;
}

static const struct ask_hold *hold_draw(const struct requester *a, struct sim_draw *d)
{
	unsigned int from = sim_below(d, ASK_HOLDS);

	for (unsigned int i = 0; i < ASK_HOLDS; i++) {
		const struct ask_hold *hold = &a->holds[(from + i) % ASK_HOLDS];

		if (hold->id && hold->count)
			return hold;
	}
	return NULL;
}

static bool part_draw(const struct requester *a, struct sim_draw *d,
		      struct ask_post *post)
{
	const struct ask_hold *hold = hold_draw(a, d);
	struct kvd_ring_part *part = &post->parts[post->part_count];
	uint64_t tokens;

	if (!hold)
		return false;
	*part = (struct kvd_ring_part){.hold = hold->id, .rows = ASK_ROWS};
	if (sim_chance(d, 30)) {
		part->row = ASK_HEADS * sim_below(d, ASK_QUERIES);
		part->rows = ASK_HEADS;
	}
	part->first = sim_below(d, hold->count);
	part->count = 1 + sim_below(d, hold->count - part->first);
	tokens = (uint64_t)part->count * ASK_CHUNK;
	if (sim_chance(d, 30))
		tokens = part->tokens = 1 + sim_below(d, (unsigned int)tokens);
	if (sim_chance(d, 30))
		part->delta = (int32_t)sim_below(d, 41) - 20;
	else if (sim_chance(d, 40))
		part->per_token = 1 + sim_below(d, ASK_CHOSEN);
	for (unsigned int i = 0; i < part->rows / ASK_HEADS * part->per_token; i++)
		post->select[post->select_count++] =
			sim_chance(d, 15) ? UINT32_MAX
					  : sim_below(d, (unsigned int)tokens);
	post->first[post->part_count++] = hold->first;
	return true;
}

static void seat_fill(const struct requester *a, unsigned int seat, struct ask_post *post,
		      struct sim_draw *d)
{
	for (unsigned int i = 0; i < ASK_ROWS * ASK_DIMS; i++)
		post->q[i] = value_to_bf16(value_draw(d));
	memcpy(ask_seat(a, seat, a->q), post->q, sizeof(post->q));
	memset(ask_seat(a, seat, a->o), 0x5a, a->seat_bytes - a->o);
	if (post->value) { /* its rows come later */
		memset(ask_seat(a, seat, a->q), 0xff, sizeof(post->q));
		memset(ask_seat(a, seat, a->ready), 0, a->seat_bytes - a->ready);
	}
	memcpy(ask_shadow(a, seat, 0), ask_seat(a, seat, 0), a->seat_bytes);
}

/* The engine's stream has got there. */
static void seat_ready(struct requester *a, unsigned int seat)
{
	struct ask_post *post = &a->posts[seat];

	post->ready = true;
	memcpy(ask_seat(a, seat, a->q), post->q, sizeof(post->q));
	memcpy(ask_shadow(a, seat, a->q), post->q, sizeof(post->q));
	memcpy(ask_seat(a, seat, a->ready), &post->value, sizeof(post->value));
	memcpy(ask_shadow(a, seat, a->ready), &post->value, sizeof(post->value));
}

static void seat_post(struct sim *sim, struct requester *a, unsigned int seat,
		      struct sim_draw *d)
{
	struct ask_post *post = &a->posts[seat];
	uint32_t us = sim->script->calm ? 3000000 : 3000 + sim_below(d, 1500000);
	struct kvd_ring_entry e = {.op = KVD_RING_ATTEND,
				   .slot = SESSION_SLOTS + seat,
				   .gen = ++a->gens[seat],
				   .a = a->attend,
				   .n0 = seat,
				   .n2 = us};
	struct payload p = {0};
	unsigned int parts = 1 + sim_below(d, ASK_PARTS);

	*post = (struct ask_post){.gen = e.gen};
	if (sim_chance(d, 30))
		e.c = post->value = e.gen;
	e.b = post->layer = sim_below(d, ASK_LAYERS);
	while (parts-- > 0)
		(void)part_draw(a, d, post);
	if (!post->part_count)
		return;
	seat_fill(a, seat, post, d);
	if (post->value && (sim->script->calm || sim_chance(d, 30)))
		seat_ready(a, seat);
	payload_add(&p, post->parts, post->part_count * sizeof(*post->parts));
	payload_add(&p, post->select, post->select_count * sizeof(*post->select));
	p.views = p.len;
	p.count = post->part_count;
	post->deadline_ns = now_of(sim) + us * UINT64_C(1000);
	cJSON_Delete(entry_say(&sim->c, a->session, &e, &p));
	post->word = slot_read(a->session, e.slot).word;
	/* with no memory for the command it was not even read */
	post->live = post->used = kvd_word_gen(post->word) == e.gen;
	if (post->live)
		ask_rows_back(a, seat);
	sim_totals->posts += post->used;
}

static void rows_post(struct sim *sim, struct requester *a, struct sim_draw *d)
{
	unsigned int most = 1 + sim_below(d, 3);

	for (unsigned int i = 0; i < most; i++) {
		unsigned int seat = sim_below(d, ASK_SEATS);

		sim_ask_observe(sim);
		if (!a->posts[seat].live)
			seat_post(sim, a, seat, d);
		else if (a->posts[seat].value && !a->posts[seat].ready)
			seat_ready(a, seat);
	}
}

/* ---- their ends ---- */

static void posts_canceled(struct requester *a)
{
	for (unsigned int s = 0; s < ASK_SEATS; s++)
		a->posts[s].canceled = true;
}

static void seat_cancel(struct sim *sim, struct requester *a, unsigned int seat)
{
	struct kvd_ring_entry e = {.op = KVD_RING_CANCEL,
				   .a = KVD_RING_IDS + SESSION_SLOTS + seat};

	a->posts[seat].canceled = true;
	cJSON_Delete(entry_say(&sim->c, a->session, &e, NULL));
}

static void seats_again(struct sim *sim, struct requester *a, bool region)
{
	posts_canceled(a);
	offload_hold(sim_kvd(sim, a->place)->offload, false);
	if (region) {
		cluster_ok(&sim->c, a->session,
			   "{'cmd':'region.unregister','region':%llu}",
			   (unsigned long long)a->region);
		sim_ask_observe(sim);
	}
	cluster_ok(&sim->c, a->session, "{'cmd':'attention.close','attend':%llu}",
		   (unsigned long long)a->attend);
	sim_ask_observe(sim);
	for (unsigned int s = 0; s < ASK_SEATS; s++) {
		if (a->posts[s].live)
			sim_broken(sim, "end: a post outlives its seats at place %u",
				   a->place);
	}
	if (region)
		seats_register(sim, a);
	seats_open(sim, a);
}

static void requester_acts(struct sim *sim, struct requester *a, struct sim_draw *d)
{
	unsigned int what = sim_below(d, 10);

	if (what < 6)
		seat_cancel(sim, a, sim_below(d, ASK_SEATS));
	else if (what < 8)
		seats_again(sim, a, what == 7);
	else if (graves_have_room(sim)) {
		requester_dies(sim, a);
		requester_joins(sim, a->place);
	}
}

bool sim_ask_act(struct sim *sim, const struct sim_event *event)
{
	struct sim_draw d = {event->draw ^ 0xa77e9d};
	unsigned int place = sim_below(&d, sim->script->places);
	struct requester *a = &asks.requesters[place];

	switch (event->kind) {
	case SIM_ROWS:
		rows_post(sim, a, &d);
		return false;
	case SIM_CHUNKS:
		chunks_act(sim, a, &d);
		return false;
	case SIM_REQUESTER:
		requester_acts(sim, a, &d);
		return true;
	case SIM_KERNEL:
		kernels_hold(sim, place, !asks.held[sim->at[place]]);
		return true;
	default:
		return ask_forge(sim, &d);
	}
}

/* ---- the run ---- */

/* Before anything goes wrong each has something to ask. */
static void requesters_hold(struct sim *sim)
{
	struct sim_draw d = {sim->script->seed ^ 0x401d};

	for (unsigned int i = 0; i < 2 * sim->script->places; i++)
		chunks_put(sim, &asks.requesters[i / 2], &d);
	cluster_run(&sim->c, 300 * SIM_MS);
	for (unsigned int i = 0; i < 3 * sim->script->places; i++)
		chunks_hold(sim, &asks.requesters[i / 3], &d);
}

void sim_ask_begin(struct sim *sim)
{
	asks = (struct asks){0};
	ask_forge_begin();
	ask_judge_begin();
	for (unsigned int p = 0; sim->script->asks && p < sim->script->places; p++)
		place_stores(sim, p);
	for (unsigned int p = 0; sim->script->asks && p < sim->script->places; p++)
		requester_joins(sim, p);
	if (sim->script->asks)
		requesters_hold(sim);
}

void sim_ask_observe(struct sim *sim)
{
	for (unsigned int p = 0; sim->script->asks && p < sim->script->places; p++) {
		struct requester *a = &asks.requesters[p];

		for (unsigned int s = 0; a->alive && s < ASK_SEATS; s++) {
			if (a->posts[s].live)
				ask_judge_post(sim, a, s);
		}
	}
}

void sim_ask_check_memory(struct sim *sim)
{
	for (unsigned int p = 0; sim->script->asks && p < sim->script->places; p++) {
		if (!asks.requesters[p].alive)
			continue;
		ask_judge_seats(sim, &asks.requesters[p].seats, "a requester");
		ask_judge_sticky(sim, &asks.requesters[p]);
	}
}

void sim_ask_check_ended(struct sim *sim)
{
	for (unsigned int p = 0; sim->script->asks && p < sim->script->places; p++) {
		for (unsigned int s = 0; s < ASK_SEATS; s++) {
			if (asks.requesters[p].posts[s].live)
				sim_broken(sim, "end: a post at place %u never ends", p);
		}
	}
}

void sim_ask_leave(struct sim *sim)
{
	for (unsigned int p = 0; sim->script->asks && p < sim->script->places; p++)
		requester_dies(sim, &asks.requesters[p]);
}

void sim_ask_end(struct sim *sim)
{
	for (unsigned int n = 0; sim->script->asks && n < sim->c.count; n++)
		ask_judge_place(sim, n, sim->c.nodes[n].alive);
	for (unsigned int n = 0; n < sim->c.count; n++)
		offload_free(asks.kernels[n]);
}

void sim_ask_bury(struct sim *sim)
{
	for (unsigned int i = 0; i < asks.grave_count; i++) {
		ask_judge_seats(sim, &asks.graves[i], "a dead requester");
		seats_free(&asks.graves[i]);
		cache_close(&asks.caches[i]);
	}
}
