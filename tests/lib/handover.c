/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The image that a destination must have is written by loops straight from the
 * definition of a layout: every token, field, unit and byte. Nothing of the planner is
 * used for it, and of the daemon only the public commands.
 */
#include "tests/lib/file.h"
#include "tests/lib/handover.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/kvd_status.h"
#include "tests/lib/plan_golden.h"

#define GAP 64u /* bytes of noise between buffers */
#define TEXT 65536u

/* ---- bytes ---- */

static uint64_t mix(uint64_t x)
{
	x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
	return x ^ (x >> 31);
}

static uint64_t mix_text(uint64_t seed, const char *text)
{
	for (; *text; text++)
		seed = mix(seed + (uint8_t)*text);
	return seed;
}

static void spread(uint64_t seed, uint8_t *to, uint64_t bytes)
{
	for (uint64_t i = 0; i < bytes; i++) {
		if (i % 8 == 0)
			seed = mix(seed + 1);
		to[i] = (uint8_t)(seed >> i % 8 * 8);
	}
}

/* The request's tokens [begin, end) of one field, in an image of a rank. */
static void image_put_field(const struct handover_rank *rank, uint8_t *image,
			    const struct layout_view *v, const struct layout_field *f,
			    uint64_t seed, const struct handover_pages *p, uint64_t begin,
			    uint64_t end)
{
	for (uint64_t t = begin; t < end; t++) {
		uint64_t slot = t - p->first_token;

		assert_true(t >= p->first_token && slot / v->page_tokens < p->count);
		for (uint32_t u = 0; u < f->units; u++)
			spread(mix(mix(seed + t) + f->first_unit + u),
			       image + rank->at[f->buffer] + f->offset +
				       p->pages[slot / v->page_tokens] * f->page_stride +
				       slot % v->page_tokens * f->token_stride +
				       u * f->unit_stride,
			       f->unit_bytes);
	}
}

static void put_view(const struct handover_rank *rank, uint8_t *image,
		     const struct handover_view *view, enum handover_side side,
		     uint64_t begin, uint64_t end)
{
	const struct layout_view *v = layout_view_find(rank->layout, view->name);

	assert_non_null(v);
	for (uint32_t l = 0; l < v->layer_count; l++)
		for (uint32_t f = 0; f < v->layers[l].field_count; f++) {
			const struct layout_field *field = &v->layers[l].fields[f];
			uint64_t seed = mix_text(v->layers[l].layer + 1, view->name);

			image_put_field(rank, image, v, field,
					mix_text(seed, field->name), &view->side[side],
					begin, end);
		}
}

/* Noise everywhere; in a source, all that its pages hold of the request. */
static void prepare(struct handover *h, const struct handover_request *req)
{
	for (unsigned int s = 0; s < 2; s++)
		for (unsigned int r = 0; r < h->count[s]; r++) {
			const struct handover_rank *rank = &h->ranks[s][r];

			spread(mix(h->room * 16 + s * 8 + r), rank->want, rank->bytes);
			for (unsigned int i = 0; i < req->view_count && s == 0; i++)
				put_view(rank, rank->want, &req->views[i], s,
					 req->views[i].side[s].first_token,
					 req->views[i].end);
			memcpy(rank->base, rank->want, rank->bytes);
			for (unsigned int i = 0; i < req->view_count && s == 1; i++)
				put_view(rank, rank->want, &req->views[i], s,
					 req->views[i].begin, req->views[i].end);
		}
}

uint64_t handover_wrong(const struct handover *h, const char *what)
{
	uint64_t wrong = 0;

	for (unsigned int s = 0; s < 2; s++)
		for (unsigned int r = 0; r < h->count[s]; r++) {
			const struct handover_rank *rank = &h->ranks[s][r];

			if (memcmp(rank->base, rank->want, rank->bytes) == 0)
				continue;
			for (uint64_t i = 0; i < rank->bytes; i++) {
				if (rank->base[i] == rank->want[i])
					continue;
				if (wrong++ == 0 && what)
					print_error("%s: byte %llu of %s rank %u\n", what,
						    (unsigned long long)i,
						    s ? "decode" : "prefill", r);
			}
		}
	return wrong;
}

/* ---- ranks ---- */

void handover_new(struct handover *h)
{
	memset(h, 0, sizeof(*h));
	cluster_new(&h->c, 1, 2 * HANDOVER_RANKS_MAX);
	h->room = 1;
}

void handover_free(struct handover *h)
{
	cluster_free(&h->c);
	for (unsigned int s = 0; s < 2; s++)
		for (unsigned int r = 0; r < h->count[s]; r++) {
			struct handover_rank *rank = &h->ranks[s][r];

			munmap(rank->base, rank->bytes);
			close(rank->fd);
			free(rank->want);
			free(rank->at);
			layout_free(rank->layout);
		}
}

static unsigned int node_of(enum handover_side side, unsigned int rank)
{
	return side * HANDOVER_RANKS_MAX + rank;
}

static void make_memory(struct handover_rank *rank)
{
	const struct layout *layout = rank->layout;

	rank->at = calloc(layout->buffer_count, sizeof(*rank->at));
	rank->bytes = GAP;
	for (uint32_t b = 0; b < layout->buffer_count; b++) {
		rank->at[b] = rank->bytes;
		rank->bytes += layout->buffers[b] + GAP;
	}
	rank->want = malloc(rank->bytes);
	rank->fd = memfd_create("cache", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert_true(rank->fd >= 0 && file_fill(rank->fd, rank->bytes) == 0);
	rank->base =
		mmap(NULL, rank->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, rank->fd, 0);
	assert_ptr_not_equal(rank->base, MAP_FAILED);
}

static uint64_t member(const cJSON *json, const char *name)
{
	const cJSON *n = cJSON_GetObjectItemCaseSensitive(json, name);

	if (!cJSON_IsNumber(n))
		fail_msg("no %s in %s", name, cJSON_PrintUnformatted(json));
	return (uint64_t)n->valuedouble;
}

static uint64_t number(cJSON *answer, const char *name)
{
	uint64_t value = member(answer, name);

	cJSON_Delete(answer);
	return value;
}

static uint64_t register_memory(struct handover *h, const struct handover_rank *rank)
{
	char text[160];

	snprintf(text, sizeof(text),
		 "{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,\"length\":%"
		 "llu,\"address\":\"%llu\"}",
		 (unsigned long long)rank->bytes,
		 (unsigned long long)(uintptr_t)rank->base);
	return number(cluster_call_fd(&h->c, rank->session, dup(rank->fd), NULL, text),
		      "region");
}

static void register_pool(struct handover *h, struct handover_rank *rank, uint64_t region)
{
	cJSON *regions = cJSON_CreateArray(), *layout, *line = cJSON_CreateObject();
	char *text;

	must(layout_print(rank->layout, &layout));
	for (uint32_t b = 0; b < rank->layout->buffer_count; b++) {
		cJSON *place = cJSON_CreateObject();

		cJSON_AddItemToArray(regions, place);
		cJSON_AddNumberToObject(place, "region", (double)region);
		cJSON_AddNumberToObject(place, "offset", (double)rank->at[b]);
	}
	cJSON_AddStringToObject(line, "cmd", "pool.register");
	cJSON_AddStringToObject(line, "name", "cache");
	cJSON_AddItemToObject(line, "layout", layout);
	cJSON_AddItemToObject(line, "regions", regions);
	text = cJSON_PrintUnformatted(line);
	rank->pool =
		number(cluster_call_fd(&h->c, rank->session, -1, NULL, text), "pool");
	cJSON_free(text);
	cJSON_Delete(line);
}

void handover_rank(struct handover *h, enum handover_side side, struct layout *layout)
{
	unsigned int r = h->count[side]++;
	struct handover_rank *rank = &h->ranks[side][r];

	assert_true(r < HANDOVER_RANKS_MAX);
	must(layout_check(layout));
	rank->layout = layout;
	rank->session =
		cluster_engine(&h->c, node_of(side, r), side ? "decode" : "prefill");
	make_memory(rank);
	register_pool(h, rank, register_memory(h, rank));
}

/* ---- rooms ---- */

static void print_pages(FILE *out, const struct handover_pages *p, unsigned int first,
			unsigned int count)
{
	fputs("'pages':[", out);
	for (unsigned int i = 0; i < count; i++)
		fprintf(out, "%s%u", i ? "," : "", p->pages[first + i]);
	fputs("]", out);
}

/* What one side has of tokens [begin, end) of a view, whole pages around them. */
static void print_view(FILE *out, const struct handover_view *view,
		       enum handover_side side, uint32_t page_tokens, uint64_t begin,
		       uint64_t end)
{
	const struct handover_pages *p = &view->side[side];
	uint64_t first = (begin - p->first_token) / page_tokens;
	uint64_t last = (end - p->first_token + page_tokens - 1) / page_tokens;

	fprintf(out, "'%s':{", view->name);
	print_pages(out, p, (unsigned int)first,
		    (unsigned int)(end > begin ? last - first : 0));
	fprintf(out, ",'first_token':%llu,'tokens':[%llu,%llu]}",
		(unsigned long long)(p->first_token + first * page_tokens),
		(unsigned long long)begin, (unsigned long long)end);
}

static uint32_t page_tokens_of(const struct handover *h, enum handover_side side,
			       const char *view)
{
	return layout_view_find(h->ranks[side][0].layout, view)->page_tokens;
}

/* "'views':{…}" of a whole request, or of its chunk of tokens [from, to). */
static char *views_text(const struct handover *h, enum handover_side side,
			const struct handover_request *req, uint64_t from, uint64_t to,
			bool last)
{
	char *text = NULL;
	size_t len = 0;
	FILE *out = open_memstream(&text, &len);
	bool some = false;

	fputs("'views':{", out);
	for (unsigned int i = 0; i < req->view_count; i++) {
		const struct handover_view *view = &req->views[i];
		uint32_t page_tokens = page_tokens_of(h, side, view->name);
		/* the prefill side gives all that it has: the hit is the other's */
		uint64_t begin = side == HANDOVER_PREFILL ? view->side[side].first_token
							  : view->begin;
		uint64_t end = view->end;

		if (page_tokens == 1 && !last)
			continue;
		if (page_tokens > 1) {
			begin = from > begin ? from : begin;
			end = to < end ? to : end;
		}
		if (begin > end)
			continue;
		fputs(some ? "," : "", out);
		print_view(out, view, side, page_tokens, begin, end);
		some = true;
	}
	fputs("}", out);
	fclose(out);
	return text;
}

static void call(struct handover *h, const struct handover_rank *rank, const char *verb,
		 const char *members)
{
	cluster_ok(&h->c, rank->session, "{'cmd':'room.%s','room':'%llu',%s}", verb,
		   (unsigned long long)h->room, members);
}

static void open_room(struct handover *h, enum handover_side side, unsigned int r,
		      const char *role, const char *more)
{
	char text[TEXT];

	snprintf(text, sizeof(text), "'role':'%s','pool':%llu%s%s", role,
		 (unsigned long long)h->ranks[side][r].pool, *more ? "," : "", more);
	call(h, &h->ranks[side][r], "open", text);
}

/* "'sources':[…]": every prefill rank. */
static void sources_text(const struct handover *h, char *out, size_t size)
{
	size_t n = (size_t)snprintf(out, size, "'sources':[");

	for (unsigned int r = 0; r < h->count[HANDOVER_PREFILL]; r++)
		n += (size_t)snprintf(out + n, size - n, "%s'%s'", r ? "," : "",
				      h->c.nodes[node_of(HANDOVER_PREFILL, r)].endpoint);
	snprintf(out + n, size - n, "]");
}

static void add_record(struct handover *h, enum handover_side side,
		       struct session *session)
{
	cJSON *room = cluster_call(&h->c, session, "{'cmd':'room.show','room':'%llu'}",
				   (unsigned long long)h->room);
	const cJSON *sent = cJSON_GetObjectItemCaseSensitive(room, "sent");
	const cJSON *received = cJSON_GetObjectItemCaseSensitive(room, "received");

	if (side == HANDOVER_PREFILL) {
		h->carried += member(sent, "bytes") > 0;
		cJSON_Delete(room);
		return;
	}
	h->moved += member(received, "bytes");
	h->rows += member(received, "rows");
	assert_int_equal(member(received, "staged_bytes"), 0);
	cJSON_Delete(room);
}

/* All succeed, and are closed. */
static void end_rooms(struct handover *h, const char *const roles[2])
{
	h->moved = h->rows = h->carried = 0;
	for (int s = 1; s >= 0; s--)
		for (unsigned int r = 0; r < h->count[s]; r++) {
			struct session *session = h->ranks[s][r].session;

			cluster_until_state(&h->c, session, roles[s], h->room,
					    KVD_SUCCESS);
			add_record(h, s, session);
		}
	for (unsigned int s = 0; s < 2; s++)
		for (unsigned int r = 0; r < h->count[s]; r++)
			cluster_ok(&h->c, h->ranks[s][r].session,
				   "{'cmd':'room.close','room':'%llu'}",
				   (unsigned long long)h->room);
	h->room++;
}

static void send_all(struct handover *h, const struct handover_rank *rank,
		     const struct handover_request *req)
{
	uint64_t end = 0, at = 0, step = req->chunk_tokens;
	unsigned int seq = 0;

	for (unsigned int i = 0; i < req->view_count; i++)
		end = req->views[i].end > end ? req->views[i].end : end;
	do {
		uint64_t to = step && at + step < end ? at + step : UINT64_MAX;
		char *views = views_text(h, HANDOVER_PREFILL, req, at, to, to >= end);
		char text[TEXT];

		assert_true((size_t)snprintf(text, sizeof(text), "'seq':%u,'last':%s,%s",
					     seq++, to >= end ? "true" : "false",
					     views) < sizeof(text));
		call(h, rank, "send", text);
		free(views);
		at = to;
	} while (at < end);
}

void handover_push(struct handover *h, const struct handover_request *req)
{
	char *views = views_text(h, HANDOVER_DECODE, req, 0, UINT64_MAX, true);
	char sources[1024], text[2048];

	prepare(h, req);
	sources_text(h, sources, sizeof(sources));
	for (unsigned int r = 0; r < h->count[HANDOVER_PREFILL]; r++) {
		open_room(h, HANDOVER_PREFILL, r, "send", "");
		if (r % 2 == 0) /* half of them before the receivers are there */
			send_all(h, &h->ranks[HANDOVER_PREFILL][r], req);
	}
	for (unsigned int r = 0; r < h->count[HANDOVER_DECODE]; r++) {
		snprintf(text, sizeof(text), "%s,'receivers':%u", sources,
			 h->count[HANDOVER_DECODE]);
		open_room(h, HANDOVER_DECODE, r, "recv", text);
		call(h, &h->ranks[HANDOVER_DECODE][r], "bind", views);
	}
	for (unsigned int r = 1; r < h->count[HANDOVER_PREFILL]; r += 2)
		send_all(h, &h->ranks[HANDOVER_PREFILL][r], req);
	free(views);
	end_rooms(h, (const char *const[]){"send", "recv"});
}

void handover_pull(struct handover *h, const struct handover_request *req)
{
	char *views[2], sources[1024], text[TEXT];

	prepare(h, req);
	sources_text(h, sources, sizeof(sources));
	for (unsigned int s = 0; s < 2; s++)
		views[s] = views_text(h, s, req, 0, UINT64_MAX, true);
	for (unsigned int r = 0; r < h->count[HANDOVER_PREFILL]; r++) {
		snprintf(text, sizeof(text), "%s,'lease_ms':10000,'receivers':%u",
			 views[HANDOVER_PREFILL], h->count[HANDOVER_DECODE]);
		open_room(h, HANDOVER_PREFILL, r, "offer", text);
	}
	for (unsigned int r = 0; r < h->count[HANDOVER_DECODE]; r++) {
		snprintf(text, sizeof(text), "%s,%s", sources, views[HANDOVER_DECODE]);
		open_room(h, HANDOVER_DECODE, r, "pull", text);
	}
	for (unsigned int s = 0; s < 2; s++)
		free(views[s]);
	end_rooms(h, (const char *const[]){"offer", "pull"});
}

void handover_both(struct handover *h, const struct handover_request *req)
{
	handover_push(h, req);
	assert_int_equal(handover_wrong(h, "push"), 0);
	handover_pull(h, req);
	assert_int_equal(handover_wrong(h, "pull"), 0);
}
