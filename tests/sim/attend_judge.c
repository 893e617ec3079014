/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the judge wants of query rows:
 *
 *   still    A seat changes once, when its post succeeds. Until then, and from then on,
 *            and if it fails, each byte is as the engine left it; an end stays an end.
 *   all      Success is attention over all tokens of all parts, as the fp64 reference
 *            makes it of what the chunks' ids say.
 *   admit    Rows of a daemon that does not hold the chunks are not attended, nobody but
 *            the holder answers, and nobody but the requester says stop.
 *   learn    A failure has a code. Who is told to stop drops what still waits.
 *   end      A post ends by its deadline; when nothing went wrong, with success. With all
 *            requesters gone nothing of theirs is anywhere: posts, legs, rows, holds,
 * charges.
 *
 * It looks at seats and words as an engine does, and at daemons from inside for "admit",
 * "learn" and what is left.
 */
#include "tests/sim/attend.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/handshake/handshake.h"
#include "daemon/math/value.h"
#include "daemon/store/store_figures.h"
#include "daemon/store/store_impl.h"
#include "proto/kvd_status.h"
#include "tests/lib/ring_entries.h"

#define TOKENS_MAX (ASK_IDS * ASK_CHUNK)
#define NEAR 1e-3 /* fp32 sums of bf16 values */
#define HEAD_BYTES (ASK_DIMS * 2u)

/* ---- what chunks hold ---- */

uint16_t ask_value(unsigned int id, unsigned int layer, unsigned int field,
		   unsigned int token, unsigned int head, unsigned int d)
{
	struct sim_draw draw = {
		((((id * 8ull + layer) * 2 + field) * 64 + token) * 8 + head) * 64 + d};

	return value_to_bf16((float)sim_below(&draw, 2001) / 1000 - 1);
}

double ask_inv_freq(unsigned int i)
{
	return i ? 0.125 : 0.5;
}

/* ---- what a post makes of them ---- */

struct partial {
	double o[ASK_DIMS], m, l;
};

static void partial_add(struct partial *p, const float *o, double m, double l)
{
	double most = p->l == 0 || m > p->m ? m : p->m;
	double mine = p->l == 0 ? 0 : p->l * exp(p->m - most), theirs = l * exp(m - most);

	if (l == 0)
		return;
	for (unsigned int d = 0; d < ASK_DIMS; d++)
		p->o[d] = (p->o[d] * mine + (double)o[d] * theirs) / (mine + theirs);
	p->m = most;
	p->l = mine + theirs;
}

/* Field by field: tokens x heads x dims, of consecutive chunks. */
static void kv_make(unsigned int id, unsigned int count, unsigned int layer,
		    uint16_t kv[2][TOKENS_MAX * ASK_KV_HEADS * ASK_DIMS])
{
	for (unsigned int f = 0; f < 2; f++)
		for (unsigned int t = 0; t < count * ASK_CHUNK; t++)
			for (unsigned int n = 0; n < ASK_KV_HEADS * ASK_DIMS; n++)
				kv[f][t * ASK_KV_HEADS * ASK_DIMS + n] = ask_value(
					id + t / ASK_CHUNK, layer, f, t % ASK_CHUNK,
					n / ASK_DIMS, n % ASK_DIMS);
}

static void part_attend(const struct ask_post *post, unsigned int p,
			const uint32_t *select, struct partial *sums)
{
	static const struct attend_shape shape = {.kind = ATTEND_GQA,
						  .q_type = VALUE_BF16,
						  .kv_type = VALUE_BF16,
						  .heads = ASK_HEADS,
						  .kv_heads = ASK_KV_HEADS,
						  .dqk = ASK_DIMS,
						  .dv = ASK_DIMS,
						  .scale = ASK_SCALE};
	static uint16_t kv[2][TOKENS_MAX * ASK_KV_HEADS * ASK_DIMS];
	static uint8_t scratch[1u << 20] __attribute__((aligned(64)));
	const struct kvd_ring_part *part = &post->parts[p];
	const uint64_t token = ASK_KV_HEADS * HEAD_BYTES;
	unsigned int tokens = part->count * ASK_CHUNK;
	struct attend_kv of = {
		.k = {(const uint8_t *)kv[0], token * tokens, token, HEAD_BYTES},
		.v = {(const uint8_t *)kv[1], token * tokens, token, HEAD_BYTES},
		.page_tokens = tokens,
		.tokens = tokens};
	float o[ASK_ROWS * ASK_DIMS], m[ASK_ROWS], l[ASK_ROWS];
	struct attend_span span = {.q = post->q + part->row * ASK_DIMS,
				   .o = o,
				   .m = m,
				   .l = l,
				   .rows = part->rows,
				   .first = part->row,
				   .end = part->tokens ? (uint32_t)part->tokens : tokens,
				   .delta = part->delta,
				   .select = part->per_token ? select : NULL,
				   .per_token = part->per_token};
	struct rope rope = {.first = 0, .dims = 4, .pairs = ROPE_HALVES};
	const struct attend_job job = {.shape = &shape,
				       .kv = &of,
				       .rope = &rope,
				       .spans = &span,
				       .span_count = 1};
	double inv_freq[2] = {ask_inv_freq(0), ask_inv_freq(1)};

	rope.inv_freq = inv_freq;
	kv_make(post->first[p] + part->first, part->count, post->layer, kv);
	if (attend_job_fault(&job) ||
	    attend_scratch_bytes(&shape, part->rows) > sizeof(scratch))
		abort();
	attend_run(PICK_REF, &job, scratch);
	for (unsigned int r = 0; r < part->rows; r++)
		partial_add(&sums[part->row + r], o + r * ASK_DIMS, (double)m[r],
			    (double)l[r]);
}

static bool row_is(const struct requester *a, unsigned int seat, unsigned int row,
		   const struct partial *want)
{
	const float *o = (const float *)ask_seat(a, seat, a->o) + row * ASK_DIMS;
	double m = (double)((const float *)ask_seat(a, seat, a->m))[row];
	double l = (double)((const float *)ask_seat(a, seat, a->l))[row];

	if (want->l == 0)
		return l == 0;
	if (!(fabs(l * exp(m - want->m) / want->l - 1) < NEAR))
		return false;
	for (unsigned int d = 0; d < ASK_DIMS; d++) {
		if (!(fabs((double)o[d] - want->o[d]) <
		      NEAR + (ask_out_bf16(a) ? 0x1p-8 : 0)))
			return false;
	}
	return true;
}

/* Up to the last that a part names; nothing behind it changes. */
static unsigned int rows_of(const struct ask_post *post)
{
	unsigned int rows = 0;

	for (unsigned int p = 0; p < post->part_count; p++) {
		unsigned int end = post->parts[p].row + post->parts[p].rows;

		rows = end > rows ? end : rows;
	}
	return rows;
}

static void judge_numbers(struct sim *sim, const struct requester *a, unsigned int seat)
{
	const struct ask_post *post = &a->posts[seat];
	const uint32_t *select = post->select;
	struct partial want[ASK_ROWS] = {0};

	for (unsigned int p = 0; p < post->part_count; p++) {
		part_attend(post, p, select, want);
		select += post->parts[p].rows / ASK_HEADS * post->parts[p].per_token;
	}
	for (unsigned int r = 0; r < rows_of(post); r++) {
		if (!row_is(a, seat, r, &want[r]))
			sim_broken(
				sim,
				"all: a post of %u parts at place %u succeeded, row %u "
				"is not what its chunks make of it",
				post->part_count, a->place, r);
	}
}

/* ---- seats and words ---- */

void ask_judge_seats(struct sim *sim, const struct ask_seats *seats, const char *whose)
{
	const struct requester *a = NULL;

	for (unsigned int p = 0; p < sim->script->places; p++) {
		if (asks.requesters[p].alive &&
		    asks.requesters[p].seats.base == seats->base)
			a = &asks.requesters[p];
	}
	/* who has one under way may just have it written */
	for (unsigned int s = 0; a && s < ASK_SEATS; s++) {
		if (a->posts[s].live)
			ask_judge_post(sim, &asks.requesters[a->place], s);
	}
	for (unsigned int s = 0; !a && s < ASK_SEATS; s++) {
		if (seats->told[s].value &&
		    memcmp(seats->base + seats->told[s].at, &seats->told[s].value,
			   sizeof(uint64_t)) == 0)
			memcpy(seats->shadow + seats->told[s].at, &seats->told[s].value,
			       sizeof(uint64_t));
	}
	if (memcmp(seats->base, seats->shadow, seats->bytes) != 0)
		sim_broken(sim, "still: a seat of %s changed, and no post succeeded",
			   whose);
}

static void judge_failure(struct sim *sim, const struct requester *a,
			  const struct ask_post *post)
{
	unsigned int code = kvd_word_error(post->word);

	if (code == 0)
		sim_broken(sim, "learn: a post at place %u failed without a code",
			   a->place);
	if (code == ERR_CANCELED && !post->canceled && !post->lied)
		sim_broken(sim, "admit: a post at place %u was canceled by a stranger",
			   a->place);
	if (sim->script->calm)
		sim_broken(sim,
			   "end: a post at place %u failed with %s, and nothing had gone "
			   "wrong",
			   a->place, err_name(code));
}

void ask_rows_back(struct requester *a, unsigned int seat)
{
	struct ask_post *post = &a->posts[seat];

	if (post->back || kvd_word_state(post->word) < KVD_TRANSFERRING)
		return;
	post->back = true;
	memset(ask_seat(a, seat, a->q), 0xff, sizeof(post->q));
	memset(ask_shadow(a, seat, a->q), 0xff, sizeof(post->q));
}

/* Not before all parts have come. */
static void results_change(const struct requester *a, unsigned int seat)
{
	const struct attend_session *part = attend_session(a->session);
	const struct attend_post *post =
		part ? idmap_get(&part->posts, KVD_RING_IDS + SESSION_SLOTS + seat)
		     : NULL;
	unsigned int rows = rows_of(&a->posts[seat]);
	const size_t bytes[] = {rows * ASK_DIMS * sizeof(float), rows * sizeof(float),
				rows * sizeof(float)};
	const uint64_t at[] = {a->o, a->m, a->l};

	for (unsigned int i = 0; i < ARRAY_LEN(at) && (!post || post->merge); i++)
		memcpy(ask_shadow(a, seat, at[i]), ask_seat(a, seat, at[i]), bytes[i]);
}

void ask_judge_post(struct sim *sim, struct requester *a, unsigned int seat)
{
	struct ask_post *post = &a->posts[seat];
	unsigned int state;

	post->word = slot_read(a->session, SESSION_SLOTS + seat).word;
	state = kvd_word_state(post->word);
	if (kvd_word_gen(post->word) != post->gen)
		sim_broken(sim, "still: the slot of a post at place %u shows another",
			   a->place);
	if (state == KVD_SUCCESS && !post->lied)
		judge_numbers(sim, a, seat);
	results_change(a, seat); /* in pieces; nothing else may */
	if (post->value && (state == KVD_SUCCESS || state == KVD_FAILED))
		memcpy(ask_shadow(a, seat, a->done), &post->value, sizeof(post->value));
	if (post->value && !post->ready && state >= KVD_TRANSFERRING)
		sim_broken(sim,
			   "order: rows at place %u were read before they were there",
			   a->place);
	if (memcmp(ask_shadow(a, seat, 0), ask_seat(a, seat, 0), a->seat_bytes) != 0)
		sim_broken(sim, "still: the seat of a post %s at place %u was written",
			   state == KVD_FAILED ? "that failed" : "under way", a->place);
	ask_rows_back(a, seat);
	if (state == KVD_SUCCESS || state == KVD_FAILED) {
		post->live = false;
		sim_totals->posts_succeeded += state == KVD_SUCCESS;
		if (state == KVD_FAILED)
			judge_failure(sim, a, post);
	} else if (loop_now_ns(sim->c.loop) > post->deadline_ns + SIM_MS) {
		sim_broken(sim,
			   "end: a post at place %u is under way behind its deadline",
			   a->place);
	}
}

void ask_judge_sticky(struct sim *sim, const struct requester *a)
{
	for (unsigned int s = 0; s < ASK_SEATS; s++) {
		const struct ask_post *post = &a->posts[s];

		if (post->used && !post->live &&
		    slot_read(a->session, SESSION_SLOTS + s).word != post->word)
			sim_broken(sim, "still: the end of a post at place %u changed",
				   a->place);
	}
}

/* ---- stops ---- */

/* Rows that were taken while the one kernel was busy and held up: they wait for it. */
struct waiting {
	const struct kvd *kvd;
	const struct remote *remote;
	uint64_t up_since_ns; /* a peering's end drops its rows */
	uint64_t attend;
	uint32_t hold; /* asks.holds, then */
};

#define WAITING_MAX 64u

static struct waiting waiting[WAITING_MAX];
static unsigned int waiting_next;
static unsigned int before; /* under way, before the message */
static bool busy;

void ask_judge_begin(void)
{
	memset(waiting, 0, sizeof(waiting));
}

static unsigned int node_of(const struct sim *sim, const struct kvd *kvd)
{
	unsigned int n = 0;

	while (&sim->c.nodes[n].kvd != kvd)
		n++;
	return n;
}

static uint64_t attend_of(struct cursor body)
{
	return cursor_get_u64(&body);
}

static uint32_t code_of(struct cursor body)
{
	struct wire_attention_result msg;

	return wire_attention_result_get(&body, &msg) < 0 ? ERR_PROTO : msg.code;
}

void ask_judge_before(struct sim *sim, const struct kvd *kvd, const struct remote *remote,
		      const struct wire_header *h, struct cursor body)
{
	struct compute_figures figures;

	(void)remote;
	compute_figures(attends_of(kvd)->compute, &figures);
	before = attends_of(kvd)->under_way;
	busy = asks.held[node_of(sim, kvd)] && before > figures.waiting;
	if (h->type == WIRE_T_ATTENTION_RESULT && code_of(body) == ERR_OK &&
	    attend_of(body) >= ASK_STRANGERS && attend_of(body) < 2 * ASK_STRANGERS)
		sim_broken(sim, "admit: a stranger's rows were attended");
}

void ask_judge_after(struct sim *sim, const struct kvd *kvd, const struct remote *remote,
		     const struct wire_header *h, struct cursor body)
{
	unsigned int node = node_of(sim, kvd), now = attends_of(kvd)->under_way;
	uint64_t attend = attend_of(body);

	if (h->type == WIRE_T_ATTEND && busy && now == before + 1)
		waiting[waiting_next++ % WAITING_MAX] = (struct waiting){
			kvd, remote, remote->peer->up_since_ns, attend, asks.holds[node]};
	for (unsigned int i = 0; h->type == WIRE_T_ATTENTION_CANCEL && i < WAITING_MAX;
	     i++) {
		struct waiting *w = &waiting[i];

		if (w->kvd != kvd || w->remote != remote || w->attend != attend ||
		    w->up_since_ns != remote->peer->up_since_ns)
			continue;
		if (w->hold == asks.holds[node] && now >= before)
			sim_broken(
				sim,
				"learn: rows wait for a kernel, and their requester has "
				"said stop");
		w->kvd = NULL;
	}
}

/* ---- what is left ---- */

static uint64_t charged(const struct kvd *kvd)
{
	uint64_t objects = 0;

	for (const struct account *a = kvd->accounts.first; a; a = a->next)
		objects += a->objects[ACCOUNT_ATTENDS];
	return objects;
}

static uint64_t pinned(const struct store *store)
{
	const struct store_tenant *tenant;
	uint64_t bytes = 0;

	list_foreach(tenant, &store->tenants, link)
		bytes += arena_owner_pinned(tenant->owner);
	return bytes;
}

static void judge_remote(struct sim *sim, const struct remote *remote)
{
	const struct attend_remote *there = attend_remote(remote);

	if (there->sent || there->sent_rows || there->sent_bytes ||
	    !list_empty(&there->legs))
		sim_broken(sim, "end: of %s still %u answers are due, of %u rows",
			   remote->label, there->sent, there->sent_rows);
}

void ask_judge_place(struct sim *sim, unsigned int node, bool alive)
{
	const struct kvd *kvd = &sim->c.nodes[node].kvd;
	const struct attends *attends = attends_of(kvd);
	struct store_figures store;
	const struct remote *remote;

	if (attends->post_count || attends->under_way || !list_empty(&attends->posts))
		sim_broken(sim, "end: node %u still has %u posts, and %u of rows at work",
			   node, attends->post_count, attends->under_way);
	if (!alive)
		return; /* it never hears of what became of the others */
	if (!list_empty(&attends->serving) || idmap_count(&attends->legs))
		sim_broken(sim, "end: node %u still serves, or has %u legs", node,
			   (unsigned int)idmap_count(&attends->legs));
	list_foreach(remote, handshake_remotes(kvd->handshake), link)
		judge_remote(sim, remote);
	store_figures(store_of(kvd), &store);
	if (store.holds || store.remote.holds || pinned(store_of(kvd)))
		sim_broken(
			sim,
			"end: node %u has %u holds, %u remote holds, %llu bytes pinned",
			node, store.holds, store.remote.holds,
			(unsigned long long)pinned(store_of(kvd)));
	if (charged(kvd))
		sim_broken(sim, "end: node %u still has %llu attends charged", node,
			   (unsigned long long)charged(kvd));
}
