/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The choice of the pool for a source of a room. An engine names the daemon and the known
 * properties of the pool: its name, its rank, the session of the engine that owns it. The
 * choice is an error unless exactly one pool matches, because pages of another engine
 * look like the right ones.
 *
 * Two sides decide. The requester chooses among the announced pools, once the other side
 * has announced all that it had when they connected (POOLS). It cannot know a pool whose
 * REGISTER is in transit, or was refused here. So its request contains the fields of the
 * choice, and the daemon that owns the pools checks them against all of its pools: when
 * the request arrives, and again when the room there takes it. The number of similar
 * pools is counted when a pool is added or removed, so a request costs nothing extra.
 * (Rejected: to ask the owner before each choice, one more round trip.)
 *
 * A choice is final: the room keeps the session of its pool (room_cover.c). If one engine
 * replaces another, the endpoint alone means the one that exists when the request is
 * taken.
 *
 * Internal pools of a daemon, as those of the chunk store, are never chosen: their daemon
 * names them by their id.
 */
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/handshake/handshake_impl.h"
#include "daemon/session/session.h"

#define WORDS_MAX 96u

/* Each of these fields distinguishes the two; none: no field does yet. */
static const char *choice_remedy(unsigned int fields, char words[WORDS_MAX])
{
	static const struct {
		unsigned int field;
		const char *word;
	} names[] = {{POOL_BY_SESSION, "session"},
		     {POOL_BY_NAME, "pool"},
		     {POOL_BY_RANK, "rank"}};
	size_t n = 0;

	if (!fields)
		return "give each pool its own name there (pool.register, field name), "
		       "and set the source's field pool";
	n += (size_t)snprintf(words, WORDS_MAX, "set the source's field ");
	for (size_t i = 0; i < ARRAY_LEN(names); i++) {
		if (fields & names[i].field)
			n += (size_t)snprintf(words + n, WORDS_MAX - n, "%s%s",
					      words[n - 1] == ' ' ? "" : " or ",
					      names[i].word);
	}
	if (fields & POOL_BY_SESSION)
		snprintf(words + n, WORDS_MAX - n, ", or its group and worker");
	return words;
}

/* ---- the requesting side ---- */

static int choice_several(const struct remote *remote, const struct remote_pool *a,
			  const struct remote_pool *b)
{
	unsigned int fields = (a->session != b->session ? POOL_BY_SESSION : 0) |
			      (strcmp(a->name, b->name) != 0 ? POOL_BY_NAME : 0) |
			      (a->layout->rank != b->layout->rank ? POOL_BY_RANK : 0);
	char words[WORDS_MAX];

	return err_raise(ERR_INVAL,
			 "sources: %.70s has several matching pools ('%.32s' rank %u, "
			 "'%.32s' rank %u); %s",
			 remote->label, a->name, a->layout->rank, b->name,
			 b->layout->rank, choice_remedy(fields, words));
}

int handshake_pool(struct remote *remote, const struct pool_wanted *wanted,
		   const struct pool *local, struct remote_pool **pool_p)
{
	struct remote_pool *pool, *found = NULL;

	assert(local->layout);
	if (!remote->pools.listed)
		return 1;
	list_foreach(pool, &remote->pools.list, link) {
		if (pool->is_session || pool->own || pool->going ||
		    (wanted->name && strcmp(pool->name, wanted->name) != 0) ||
		    (wanted->rank >= 0 && pool->layout->rank != (uint64_t)wanted->rank) ||
		    (wanted->session && pool->session != wanted->session) ||
		    (remote->peer->self && pool->id == local->id))
			continue;
		if (found)
			return err_pass(choice_several(remote, found, pool));
		found = pool;
	}
	if (!found)
		return 1;
	if (layout_compatible(local->layout, found->layout, &layout_from_destination) < 0)
		return err_prefix(-err_errno(ERR_LAYOUT), "pool '%s' of %s", found->name,
				  remote->label);
	*pool_p = found;
	return 0;
}

/* ---- the owner of the pools ---- */

static unsigned int choice_same(const struct pool *a, const struct pool *b)
{
	return (strcmp(a->name, b->name) == 0 ? POOL_BY_NAME : 0) |
	       (a->layout->rank == b->layout->rank ? POOL_BY_RANK : 0) |
	       (a->session == b->session ? POOL_BY_SESSION : 0);
}

static void choice_count(struct announcement *pub, int by)
{
	struct idmap_cursor at;

	if (pub->pool->session->own)
		return;
	idmap_foreach(&pub->hs->published, at) {
		struct announcement *other = at.value;
		unsigned int same;

		if (other == pub || other->going || other->pool->session->own)
			continue;
		same = choice_same(pub->pool, other->pool);
		for (unsigned int words = 0; words < POOL_BY_WORDS; words++) {
			if ((words & same) != words)
				continue;
			pub->alike[words] += (uint32_t)by;
			other->alike[words] += (uint32_t)by;
		}
	}
}

void choice_add(struct announcement *pub)
{
	choice_count(pub, 1);
}

void choice_remove(struct announcement *pub)
{
	if (!pub->going)
		choice_count(pub, -1);
}

int handshake_check_choice(const struct handshake *hs, const struct remote *remote,
			   uint64_t id, uint8_t named, uint64_t requester)
{
	const struct announcement *pub = idmap_get(&hs->published_by_id, id), *own;
	unsigned int by = named & (POOL_BY_WORDS - 1), fields = 0;
	char words[WORDS_MAX];
	uint32_t others;

	if (!pub || pub->going)
		return 0; /* the caller reports the missing pool */
	if (named & POOL_BY_ID)
		return 0;
	if (pub->pool->session->own)
		return err_raise(ERR_NOTFOUND, "no pool %llu", (unsigned long long)id);
	own = remote->peer->self ? idmap_get(&hs->published_by_id, requester) : NULL;
	others = pub->alike[by];
	if (others && own && own != pub && !own->going && !own->pool->session->own &&
	    (choice_same(pub->pool, own->pool) & by) == by)
		others--; /* no room takes from its own pool */
	if (!others)
		return 0;
	for (unsigned int field = POOL_BY_NAME; field < POOL_BY_WORDS; field <<= 1) {
		if (!(by & field) && pub->alike[by | field] < others)
			fields |= field;
	}
	return err_raise(ERR_INVAL,
			 "sources: pool '%.63s' rank %u is one of %u matching pools "
			 "there; %s",
			 pub->pool->name, pub->pool->layout->rank, others + 1,
			 choice_remedy(fields, words));
}
