/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Remote holds for holds of this daemon. A holder's report is used as far as it is
 * consistent: pools that it has announced to us, whose layouts serve this rank. The first
 * chunk that does not fit ends the prefix. Nothing else is trusted: the bytes arrive by
 * rooms, which check plans and leases as for any other peer.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/handshake/handshake.h"
#include "daemon/store/far_impl.h"

#define FAR_HOLDERS_MAX 2u /* of a piece */
#define RENEW_MS (FAR_LEASE_MORE_MS / 2)

struct far_hold {
	struct far_hold *next; /* of a later piece; of the same: with no more chunks */
	struct far_grant *grant;
	bool failed, late; /* late: another one was faster */
	uint32_t first;	   /* of the hold's chunks */
	uint32_t chunks;   /* that serve the hold's rank */
	uint64_t tokens;
	uint64_t *used; /* of each run that does: pools */
};

/* ---- remote holds ---- */

bool far_up(const struct remote *remote)
{
	return remote && sm_state(&remote->peer->sm) == PEER_UP && !remote->peer->self &&
	       (remote->peer->features & PEER_FEATURE_CHUNKS);
}

void far_release(struct remote *remote, uint64_t ask)
{
	const struct wire_chunk_release msg = {.ask = ask};

	if (sm_state(&remote->peer->sm) == PEER_UP &&
	    handshake_send_chunk_release(remote, &msg) < 0)
		err_clear(); /* it disconnects, which releases the hold */
}

/* Reads in progress, or a hold that joined for longer, outlive the lease that was
 * requested. */
static void on_renew(struct loop_timer *timer)
{
	struct far_grant *grant = container_of(timer, struct far_grant, renew);
	struct wire_chunk_lookup msg = {.ask = grant->ask, .lease_ms = FAR_LEASE_MORE_MS};

	memcpy(msg.space, grant->space, sizeof(msg.space));
	if (far_up(grant->remote) && handshake_send_chunk_lookup(grant->remote, &msg) < 0)
		err_clear(); /* it disconnects, which releases the hold */
	loop_timer_start(timer, RENEW_MS * LOOP_NS_PER_MS);
}

void far_grant_unref(struct far_grant *grant)
{
	if (--grant->refs)
		return;
	loop_timer_stop(&grant->renew);
	far_release(grant->remote, grant->ask);
	handshake_release(grant->remote);
	mem_free(grant->runs);
	mem_free(grant);
}

void far_hold_free(struct far_hold *far)
{
	while (far) {
		struct far_hold *next = far->next;

		far_grant_unref(far->grant);
		mem_free(far->used);
		mem_free(far);
		far = next;
	}
}

uint32_t far_hold_first(const struct far_hold *far)
{
	return far->first;
}

uint32_t far_hold_chunks(const struct far_hold *far)
{
	return far->chunks;
}

uint64_t far_hold_tokens(const struct far_hold *far)
{
	return far->tokens;
}

bool far_hold_serves(const struct far_hold *far, uint32_t i)
{
	return !far->failed && far_hold_sources(far, i) != 0;
}

struct far_hold *far_hold_at(struct far_hold *far, uint32_t i)
{
	struct far_hold *late = NULL;

	for (; far; far = far->next) { /* at most 16: two of each piece */
		if (!far_hold_serves(far, i))
			continue;
		if (!far->late && far_up(far->grant->remote))
			return far;
		late = late ? late : far;
	}
	return late;
}

struct far_hold *far_hold_other(struct far_hold *all, const struct far_hold *far,
				uint32_t i, uint32_t count)
{
	for (; all; all = all->next) { /* at most 16: two of each piece */
		if (all != far && !all->failed && i >= all->first &&
		    i + count <= all->first + all->chunks && far_up(all->grant->remote))
			return all;
	}
	return NULL;
}

struct far_hold *far_hold_next(const struct far_hold *far)
{
	return far->next;
}

void far_hold_fail(struct far_hold *far)
{
	far->failed = true;
}

void far_hold_late(struct far_hold *far)
{
	far->late = true;
}

struct remote *far_hold_remote(const struct far_hold *far)
{
	return far->grant->remote;
}

uint64_t far_hold_ask(const struct far_hold *far)
{
	return far->grant->ask;
}

uint64_t far_hold_sources(const struct far_hold *far, uint32_t i)
{
	const struct far_grant *grant = far->grant;
	uint32_t from = 0, to = grant->run_count;

	if (i < far->first || i - far->first >= far->chunks)
		return 0;
	i -= far->first;
	while (to - from > 1) {
		uint32_t at = from + (to - from) / 2;

		if (i < grant->runs[at - 1].end)
			to = at;
		else
			from = at;
	}
	return far->used[from];
}

uint64_t far_hold_pool(const struct far_hold *far, unsigned int bit)
{
	assert(bit < far->grant->pool_count);
	return far->grant->pools[bit];
}

/* NULL: not known. */
static const struct layout *grant_layout(const struct far_grant *grant, unsigned int bit)
{
	const struct remote_pool *pool =
		handshake_pool_by_id(grant->remote, grant->pools[bit]);

	return pool && !pool->is_session && !pool->going ? pool->layout : NULL;
}

const struct layout *far_hold_layout(const struct far_hold *far, unsigned int bit)
{
	return grant_layout(far->grant, bit);
}

bool far_hold_in_gpu(const struct far_hold *far)
{
	const struct far_grant *grant = far->grant;
	uint32_t from = 0, gpu = 0;

	for (uint32_t i = 0; from < far->chunks; i++) { /* runs: at most STORE_IDS_MAX */
		uint32_t end = grant->runs[i].end < far->chunks ? grant->runs[i].end
								: far->chunks;
		unsigned int bit = (unsigned int)__builtin_ctzll(far->used[i]);

		if (handshake_pool_in_gpu(
			    handshake_pool_by_id(grant->remote, grant->pools[bit])))
			gpu += end - from;
		from = end;
	}
	return 2 * (uint64_t)gpu > far->chunks;
}

/* ---- an answer ---- */

static int grant_runs(struct far_grant *grant, const struct wire_chunk_lookup_ack *msg,
		      uint32_t most)
{
	struct cursor in;
	uint32_t count;

	cursor_read(&in, msg->runs.data, msg->runs.len);
	grant->pool_count = cursor_get_count(&in, STORE_CLASSES_MAX, 8);
	for (unsigned int i = 0; i < grant->pool_count; i++)
		grant->pools[i] = cursor_get_u64(&in);
	count = cursor_get_count(&in, STORE_IDS_MAX, 12);
	grant->runs = mem_calloc(count + 1, sizeof(*grant->runs));
	if (!grant->runs)
		return err_pass(-ENOMEM);
	for (; grant->run_count < count && !in.bad; grant->run_count++) {
		struct far_run *run = &grant->runs[grant->run_count];
		uint32_t chunks = cursor_get_u32(&in);

		run->mask = cursor_get_u64(&in);
		if (chunks == 0 || chunks > most - grant->chunks)
			return err_raise(ERR_PROTO,
					 "CHUNK_LOOKUP_ACK: more than requested");
		if (!run->mask ||
		    (grant->pool_count < 64 && run->mask >> grant->pool_count) ||
		    (grant->run_count && run->mask == run[-1].mask))
			return err_raise(ERR_PROTO,
					 "CHUNK_LOOKUP_ACK: a run without a pool, "
					 "or a duplicate");
		grant->chunks += chunks;
		run->end = grant->chunks;
	}
	return cursor_check(&in, "CHUNK_LOOKUP_ACK.runs");
}

int far_grant_new(const struct far_asked *asked, const struct wire_chunk_lookup_ack *msg,
		  struct far_grant **grant_p)
{
	const struct store_space *space = asked->space;
	struct far_grant *grant = mem_zalloc(sizeof(*grant));
	int r;

	if (!grant) {
		far_release(asked->remote, asked->ask); /* nothing else will */
		return err_pass(-ENOMEM);
	}
	grant->refs = 1;
	grant->store = space->store;
	grant->remote = asked->remote;
	grant->remote->reaches++;
	grant->ask = asked->ask;
	grant->tokens = msg->tokens;
	memcpy(grant->space, space->digest, sizeof(grant->space));
	loop_timer_init(&grant->renew, space->store->kvd->loop, on_renew);
	loop_timer_start(&grant->renew, (asked->lease_ms - RENEW_MS) * LOOP_NS_PER_MS);
	r = grant_runs(grant, msg, asked->chunks);
	/* only the last chunk may be short */
	if (r >= 0 && grant->chunks > 0 &&
	    (msg->tokens <= (grant->chunks - 1) * (uint64_t)space->tokens ||
	     msg->tokens > grant->chunks * (uint64_t)space->tokens))
		r = err_raise(ERR_PROTO, "CHUNK_LOOKUP_ACK: %llu tokens of %u chunks",
			      (unsigned long long)msg->tokens, grant->chunks);
	if (r < 0) {
		far_grant_unref(grant);
		return err_pass(r);
	}
	*grant_p = grant;
	return 0;
}

/* The pools that together serve the rank; 0: they do not, or are not known. */
static uint64_t grant_cover(const struct far_grant *grant,
			    const struct store_handle *handle, uint64_t mask)
{
	const struct layout *layouts[STORE_CLASSES_MAX] = {NULL};
	bool lack = false; /* then it is a miss */

	for (unsigned int i = 0; i < grant->pool_count; i++) {
		if (mask >> i & 1)
			layouts[i] = grant_layout(grant, i);
	}
	return store_cover_layouts(handle, layouts, grant->pool_count, &lack);
}

/* The covers of a reply's runs. */
struct far_covers {
	const struct far_grant *grant;
	const struct store_handle *handle;
	struct store_cover of[STORE_COVERS_NEW];
	unsigned int count;
};

/* Thousands of runs have few masks; a holder with more is trusted up to there. */
static uint64_t far_cover(struct far_covers *covers, uint64_t mask)
{
	struct store_cover *one;

	for (unsigned int i = 0; i < covers->count; i++) {
		one = &covers->of[i];
		if (one->used ? !(one->used & ~mask) : one->mask == mask)
			return one->used;
	}
	if (covers->count == STORE_COVERS_NEW)
		return 0;
	one = &covers->of[covers->count++];
	one->mask = mask;
	one->used = grant_cover(covers->grant, covers->handle, mask);
	return one->used;
}

int far_hold_new(struct far_grant *grant, const struct store_handle *handle,
		 uint32_t first, uint32_t most, struct far_hold **far_p)
{
	struct far_covers covers = {.grant = grant, .handle = handle};
	struct far_hold *far = mem_zalloc(sizeof(*far));

	*far_p = NULL;
	if (!far)
		return err_pass(-ENOMEM);
	far->used = mem_calloc(grant->run_count + 1, sizeof(*far->used));
	if (!far->used) {
		mem_free(far);
		return err_pass(-ENOMEM);
	}
	far->first = first;
	far->grant = grant;
	grant->refs++;
	for (uint32_t i = 0; i < grant->run_count && far->chunks < most; i++) {
		far->used[i] = far_cover(&covers, grant->runs[i].mask);
		if (!far->used[i])
			break;
		far->chunks = grant->runs[i].end < most ? grant->runs[i].end : most;
	}
	far->tokens = far->chunks == grant->chunks
			      ? grant->tokens
			      : (uint64_t)far->chunks * handle->space->tokens;
	if (far->chunks)
		*far_p = far;
	else
		far_hold_free(far);
	return 0;
}

void far_hold_add(struct far_hold **first_p, struct far_hold *far)
{
	struct far_hold **at = first_p, **piece;
	unsigned int i;

	while (*at && (*at)->first < far->first) /* at most 16: two of each piece */
		at = &(*at)->next;
	piece = at;
	while (*at && (*at)->chunks >= far->chunks) /* at most 2: of the last piece */
		at = &(*at)->next;
	far->next = *at;
	*at = far;
	for (i = 0, at = piece; *at && i < FAR_HOLDERS_MAX; i++)
		at = &(*at)->next;
	far_hold_free(mem_steal(*at));
}

int far_hold_join(const struct far_hold *other, uint32_t first,
		  const struct store_handle *handle, struct far_hold **all_p)
{
	struct far_hold *far;
	uint32_t most = 0;
	int r = 0;

	for (; other && r >= 0; other = other->next) { /* at most 16: two of each piece */
		if (other->first != first)
			continue;
		most = most ? most : other->chunks; /* of the hold that is joined */
		r = far_hold_new(other->grant, handle, first, most, &far);
		if (far)
			far_hold_add(all_p, far);
	}
	return err_pass(r);
}
