/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two simulated daemons with chunks whose values depend on their place alone, so what
 * rows make of them can be computed here, in fp64, without looking at any memory of
 * kvd's. Seats are looked at as an engine sees them: by their memory and the status page.
 */
#include "tests/lib/attend_world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/attend/attend.h"
#include "daemon/math/value.h"
#include "tests/lib/file.h"

#define ROW_BYTES (AW_DIMS * 2u)
#define MEMORY_BYTES (8u << 20)

static uint32_t draw(uint32_t *seed)
{
	*seed = *seed * 1664525u + 1013904223u;
	return *seed >> 8;
}

static uint16_t draw_value(uint32_t *seed)
{
	return value_to_bf16((float)draw(seed) / (float)(1 << 23) - 1.0f);
}

/* ---- engines ---- */

static const char *ids_text(unsigned int first, unsigned int count)
{
	static char text[8192];
	char *at = text;

	for (unsigned int i = 0; i < count; i++)
		at += sprintf(at, "%s'%064x'", i ? "," : "", first + i);
	return text;
}

/* Values that depend on nothing but their place. */
static void cache_fill(struct cache *cache)
{
	uint16_t *values = (uint16_t *)(void *)cache->base;
	uint32_t seed = 7;

	for (uint64_t i = 0; i < cache->bytes / 2; i++)
		values[i] = draw_value(&seed);
}

static const char *pages_text(unsigned int count)
{
	static char text[256];
	char *at = text;

	for (unsigned int i = 0; i < count; i++)
		at += sprintf(at, "%s%u", i ? "," : "", i);
	return text;
}

static void chunks_of_pages(struct attend_world *w, const char *cmd, unsigned int node,
			    unsigned int first, unsigned int count,
			    unsigned int pages_of_each)
{
	uint64_t move;

	w->space[node] =
		cluster_space(&w->c, w->engine[node], w->cache[node].pool, w->chunk);
	move = cluster_number(
		cluster_call(&w->c, w->engine[node],
			     "{'cmd':'%s','space':%llu,'ids':[%s],'pool':%llu,"
			     "'views':{'kv':{'pages':[%s],'tokens':[0,%u]}}}",
			     cmd, (unsigned long long)w->space[node],
			     ids_text(first, count),
			     (unsigned long long)w->cache[node].pool,
			     pages_text(count * pages_of_each), count * w->chunk),
		"move");
	cluster_run(&w->c, 20 * LOOP_NS_PER_MS);
	assert_int_equal(cluster_number(cluster_call(&w->c, w->engine[node],
						     "{'cmd':'chunk.move','move':%llu}",
						     (unsigned long long)move),
					"state"),
			 KVD_SUCCESS);
	cluster_ok(&w->c, w->engine[node], "{'cmd':'chunk.close','move':%llu}",
		   (unsigned long long)move);
}

void attend_world_put(struct attend_world *w, unsigned int node, unsigned int first,
		      unsigned int count, unsigned int pages_of_each)
{
	chunks_of_pages(w, "chunk.put", node, first, count, pages_of_each);
}

void attend_world_publish(struct attend_world *w, unsigned int node, unsigned int first)
{
	chunks_of_pages(w, "chunk.publish", node, first, AW_CHUNKS, 4);
}

static void cache_begin(struct attend_world *w, unsigned int node, const char *name,
			const struct cache *geometry)
{
	w->cache[node] = *geometry;
	cluster_cache(&w->c, w->engine[node], name, 0, &w->cache[node]);
	cache_fill(&w->cache[node]);
}

void attend_world_long(struct attend_world *w, unsigned int node, unsigned int first)
{
	struct cache geometry = cluster_geometry;

	geometry.layers = 1;
	geometry.page_tokens = AW_LONG;
	geometry.pages = AW_LONG_CHUNKS;
	cache_close(&w->cache[node]);
	cache_begin(w, node, "long", &geometry);
	w->chunk = AW_LONG;
	attend_world_put(w, node, first, AW_LONG_CHUNKS, 1);
}

bool attend_world_scaled;

static void engine_begin(struct attend_world *w, unsigned int node)
{
	struct cache geometry = cluster_geometry;

	geometry.scaled = attend_world_scaled;
	w->engine[node] = cluster_engine(&w->c, node, node ? "requester" : "holder");
	cache_begin(w, node, "kv", &geometry);
	attend_world_put(w, node, 1 + 10 * node, AW_CHUNKS, 4);
}

uint64_t attend_world_hold(struct attend_world *w, unsigned int node, unsigned int first,
			   unsigned int count, unsigned int lease_ms)
{
	return cluster_number(cluster_call(&w->c, w->engine[node],
					   "{'cmd':'chunk.hold','space':%llu,'ids':[%s],"
					   "'lease_ms':%u,'remote_ms':2000}",
					   (unsigned long long)w->space[node],
					   ids_text(first, count), lease_ms),
			      "hold");
}

/* ---- seats ---- */

static void seats_new(struct attend_world *w)
{
	char text[256];

	w->bytes = 16 << 20;
	w->fd = memfd_create("seats", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert_true(w->fd >= 0 && file_fill(w->fd, w->bytes) == 0);
	w->seats = mmap(NULL, w->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, w->fd, 0);
	assert_ptr_not_equal(w->seats, MAP_FAILED);
	snprintf(text, sizeof(text),
		 "{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,\"length\":%"
		 "llu,\"address\":\"%llu\"}",
		 (unsigned long long)w->bytes, (unsigned long long)(uintptr_t)w->seats);
	w->region = cluster_number(
		cluster_call_fd(&w->c, w->engine[AW_REQUESTER], dup(w->fd), NULL, text),
		"region");
}

uint64_t attend_world_open(struct attend_world *w, const char *more)
{
	cJSON *answer = cluster_call(
		&w->c, w->engine[AW_REQUESTER],
		"{'cmd':'attention.open','region':%llu,'rows':%u,'seats':%u,'kind':'gqa',"
		"'q_type':'bf16','kv_type':'%s','heads':%u,'kv_heads':%u,'dqk':%u,"
		"'dv':%u,'scale':0.25,'key':'k','value':'v'%s}",
		(unsigned long long)w->region, w->rows, w->seat_count,
		w->cache[AW_REQUESTER].scaled ? "fp8_e4m3" : "bf16", AW_HEADS, AW_HEADS,
		AW_DIMS, AW_DIMS, more);
	static const char *const names[] = {"seat_bytes", "q",	   "o",	  "m",
					    "l",	  "ready", "done"};
	uint64_t *const to[] = {&w->seat_bytes, &w->q,	   &w->o,   &w->m,
				&w->l,		&w->ready, &w->done};

	for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
		const cJSON *n = cJSON_GetObjectItem(answer, names[i]);

		if (!n)
			fail_msg("%s", cJSON_PrintUnformatted(answer));
		*to[i] = (uint64_t)n->valuedouble;
	}
	return cluster_number(answer, "attend");
}

float *attend_world_floats(const struct attend_world *w, unsigned int seat, uint64_t at)
{
	return (float *)(void *)(w->seats + seat * w->seat_bytes + at);
}

void attend_world_rows(struct attend_world *w, unsigned int seat, unsigned int seed)
{
	uint16_t *q = (uint16_t *)(void *)attend_world_floats(w, seat, w->q);
	uint32_t from = seed;

	for (unsigned int i = 0; i < w->rows * AW_DIMS; i++)
		q[i] = draw_value(&from);
}

/* ---- the world ---- */

bool (*attend_world_tap)(unsigned int node, const struct wire_header *h,
			 struct cursor body, void *arg);
void *attend_world_tap_arg;

static int (*pass_on)(void *owner, struct remote *remote, const struct wire_header *h,
		      struct cursor *body);

static int on_message(void *owner, struct remote *remote, const struct wire_header *h,
		      struct cursor *body)
{
	const struct kvd *kvd = owner;

	if (h->type >= WIRE_T_ATTEND && h->type <= WIRE_T_ATTENTION_CANCEL &&
	    attend_world_tap &&
	    attend_world_tap(kvd->config->name[1] == '0' ? AW_HOLDER : AW_REQUESTER, h,
			     *body, attend_world_tap_arg))
		return 0;
	return pass_on(owner, remote, h, body);
}

static void wrap(struct kvd *kvd, struct handshake_events *events)
{
	(void)kvd;
	pass_on = events->on_message;
	events->on_message = on_message;
}

struct remote *attend_world_remote(const struct attend_world *w, unsigned int node)
{
	struct remote *remote;

	list_foreach(remote, handshake_remotes(w->c.nodes[node].kvd.handshake), link) {
		if (strcmp(remote->peer->name, node == AW_HOLDER ? "n1" : "n0") == 0)
			return remote;
	}
	fail_msg("the other daemon is not known");
	return NULL;
}

static void world_new(struct attend_world *w, unsigned int threads, unsigned int nodes)
{
	char stores[160];
	struct cluster_store_args args = {.memory_bytes = MEMORY_BYTES,
					  .attention_threads = threads};

	memset(w, 0, sizeof(*w));
	w->rows = AW_ROWS;
	w->seat_count = AW_SEATS;
	w->chunk = AW_CHUNK;
	cluster_wrap_events(wrap);
	cluster_new(&w->c, 3, nodes);
	cluster_store(&w->c, AW_HOLDER, &args);
	if (nodes > AW_SECOND)
		cluster_store(&w->c, AW_SECOND, &args);
	snprintf(stores, sizeof(stores), "%s %s", w->c.nodes[AW_HOLDER].endpoint,
		 nodes > AW_SECOND ? w->c.nodes[AW_SECOND].endpoint : "");
	args.stores = stores;
	cluster_store(&w->c, AW_REQUESTER, &args);
	for (unsigned int i = 0; i < nodes; i++)
		engine_begin(w, i);
	cluster_run(&w->c, LOOP_NS_PER_S);
	seats_new(w);
	w->attend = attend_world_open(w, "");
	w->hold = attend_world_hold(w, AW_REQUESTER, 1, AW_CHUNKS, 600000);
	w->near = attend_world_hold(w, AW_REQUESTER, 11, AW_CHUNKS, 600000);
}

void attend_world_new(struct attend_world *w, unsigned int threads)
{
	world_new(w, threads, 2);
}

void attend_world_new_two(struct attend_world *w, unsigned int threads)
{
	world_new(w, threads, 3);
}

void attend_world_free(struct attend_world *w)
{
	cluster_free(&w->c);
	cluster_wrap_events(NULL);
	for (unsigned int i = 0; i < 3 && w->engine[i]; i++)
		cache_close(&w->cache[i]);
	munmap(w->seats, w->bytes);
	close(w->fd);
}

int attend_world_setup(void **state)
{
	struct attend_world *w = calloc(1, sizeof(*w));

	assert_non_null(w);
	attend_world_new(w, 1);
	*state = w;
	return 0;
}

int attend_world_teardown(void **state)
{
	attend_world_free(*state);
	free(*state);
	attend_world_tap = NULL;
	return 0;
}

/* ---- posts ---- */

struct kvd_ring_part attend_world_part(uint64_t hold)
{
	return (struct kvd_ring_part){.hold = hold, .rows = AW_ROWS, .count = AW_CHUNKS};
}

struct kvd_ring_entry attend_world_entry(struct attend_world *w, unsigned int seat,
					 unsigned int layer)
{
	return (struct kvd_ring_entry){.op = KVD_RING_ATTEND,
				       .slot = AW_SLOT + seat,
				       .gen = ++w->gens[seat],
				       .a = w->attend,
				       .b = layer,
				       .n0 = seat};
}

static void give(struct attend_world *w, struct kvd_ring_entry e,
		 const struct kvd_ring_part *parts, unsigned int count,
		 const uint32_t *select, unsigned int select_count)
{
	struct payload p = {0};

	payload_add(&p, parts, count * sizeof(*parts));
	payload_add(&p, select, select_count * sizeof(*select));
	p.views = p.len;
	p.count = count;
	entry_give(&w->c, w->engine[AW_REQUESTER], &e, &p);
}

void attend_world_post(struct attend_world *w, unsigned int seat, unsigned int layer,
		       const struct kvd_ring_part *parts, unsigned int count,
		       const uint32_t *select, unsigned int select_count)
{
	give(w, attend_world_entry(w, seat, layer), parts, count, select, select_count);
}

void attend_world_post_for(struct attend_world *w, unsigned int seat,
			   const struct kvd_ring_part *part, unsigned int deadline_us)
{
	struct kvd_ring_entry e = attend_world_entry(w, seat, 0);

	e.n2 = deadline_us;
	give(w, e, part, 1, NULL, 0);
}

void attend_world_order(struct attend_world *w, unsigned int seat, uint64_t value,
			const struct kvd_ring_part *part, unsigned int deadline_us)
{
	struct kvd_ring_entry e = attend_world_entry(w, seat, 0);

	e.c = value;
	e.n2 = deadline_us;
	give(w, e, part, 1, NULL, 0);
}

uint64_t *attend_world_word(const struct attend_world *w, unsigned int seat, uint64_t at)
{
	return (uint64_t *)(void *)(w->seats + seat * w->seat_bytes + at);
}

unsigned int attend_world_state(const struct attend_world *w, unsigned int seat)
{
	return kvd_word_state(slot_read(w->engine[AW_REQUESTER], AW_SLOT + seat).word);
}

unsigned int attend_world_error(const struct attend_world *w, unsigned int seat)
{
	return kvd_word_error(slot_read(w->engine[AW_REQUESTER], AW_SLOT + seat).word);
}

/* ---- what is right ---- */

static double value(const struct attend_world *w, unsigned int layer, unsigned int field,
		    unsigned int token, unsigned int head, unsigned int d)
{
	const struct cache *cache = &w->cache[0];
	unsigned int page = cache->page_tokens;
	uint16_t bits;

	memcpy(&bits,
	       cache_at(cache, layer, field, token / page, token % page, head, 2 * d),
	       sizeof(bits));
	return value_from_bf16(bits);
}

static double logit(const struct attend_world *w, unsigned int seat, unsigned int layer,
		    unsigned int row, unsigned int token)
{
	const uint16_t *q =
		(const uint16_t *)(const void *)attend_world_floats(w, seat, w->q) +
		row * AW_DIMS;
	double sum = 0;

	for (unsigned int d = 0; d < AW_DIMS; d++)
		sum += (double)value_from_bf16(q[d]) *
		       value(w, layer, 0, token, row % AW_HEADS, d);
	return sum * 0.25;
}

static void row_right(const struct attend_world *w, unsigned int seat, unsigned int layer,
		      unsigned int row, unsigned int tokens, const uint32_t *select)
{
	const float *o = attend_world_floats(w, seat, w->o) + row * AW_DIMS;
	double want[AW_DIMS] = {0}, l = 0, got;

	for (unsigned int i = 0; i < tokens; i++) {
		uint32_t token = select ? select[i] : i;
		double weight;

		if (token == UINT32_MAX)
			continue;
		weight = exp(logit(w, seat, layer, row, token));
		l += weight;
		for (unsigned int d = 0; d < AW_DIMS; d++)
			want[d] += weight * value(w, layer, 1, token, row % AW_HEADS, d);
	}
	got = attend_world_floats(w, seat, w->l)[row] *
	      exp((double)attend_world_floats(w, seat, w->m)[row]);
	if (l == 0)
		assert_true(attend_world_floats(w, seat, w->l)[row] == 0);
	else
		assert_true(fabs(got / l - 1) < 1e-2);
	for (unsigned int d = 0; d < AW_DIMS && l != 0; d++)
		assert_true(fabs((double)o[d] - want[d] / l) < 1e-2);
}

void attend_world_right(const struct attend_world *w, unsigned int seat,
			unsigned int layer, unsigned int tokens, const uint32_t *select,
			unsigned int per_token)
{
	assert_int_equal(attend_world_state(w, seat), KVD_SUCCESS);
	for (unsigned int row = 0; row < w->rows; row++) {
		const uint32_t *of = select ? select + row / AW_HEADS * per_token : NULL;

		row_right(w, seat, layer, row, select ? per_token : tokens, of);
	}
}

static bool is_quiet(void *arg)
{
	struct attend_world *w = arg;

	return attends_drained(attends_of(&w->c.nodes[0].kvd)) &&
	       attends_drained(attends_of(&w->c.nodes[1].kvd));
}

void attend_world_quiet(struct attend_world *w)
{
	cluster_until(&w->c, is_quiet, w, "attends drained");
}
