/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The board: ranks by group, each with its owner.
 *
 * An entry hangs in two lists, its group's and its owner's, so that a query
 * walks one group and the end of a session or peer takes down what was its own,
 * without a search. Groups and owners exist as long as they have entries.
 *
 * Everything here is claimed by others. What is checked: places lie inside
 * the sizes, the sizes of one group agree, endpoints can be dialled, and the
 * whole group still fits into one message to each asker - so a group that
 * could not be told is refused when it grows, not when it is asked for.
 */
#include "daemon/bootstrap/bootstrap_impl.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"

/* cookie, code, an empty text, the blob's length and count */
#define ROUTE_FIXED_BYTES (8u + 4u + 2u + 4u + 4u)
#define RECORD_FIXED_BYTES (2u + 8u * 4u + 3u * 2u)

static const char *const axis_names[BOOTSTRAP_AXES] = {"tp", "pp", "dp", "cp"};

/* ---- records: u16 length of what follows, so that newer ones can be longer ---- */

static size_t rank_bytes(const struct bootstrap_rank *rank)
{
	return RECORD_FIXED_BYTES + strlen(rank->endpoint) + strlen(rank->pool) +
	       strlen(rank->summary);
}

void rank_put(struct cursor *out, const struct bootstrap_rank *rank)
{
	cursor_put_u16(out, (uint16_t)(rank_bytes(rank) - 2));
	for (unsigned int i = 0; i < BOOTSTRAP_AXES; i++) {
		cursor_put_u32(out, rank->rank[i]);
		cursor_put_u32(out, rank->size[i]);
	}
	cursor_put_str(out, rank->endpoint);
	cursor_put_str(out, rank->pool);
	cursor_put_str(out, rank->summary);
}

void rank_get(struct cursor *in, struct bootstrap_rank *rank)
{
	size_t len = cursor_get_u16(in);
	const void *record = cursor_get_bytes(in, len);
	struct cursor c;

	memset(rank, 0, sizeof(*rank));
	if (!record)
		return;
	cursor_read(&c, record, len);
	for (unsigned int i = 0; i < BOOTSTRAP_AXES; i++) {
		rank->rank[i] = cursor_get_u32(&c);
		rank->size[i] = cursor_get_u32(&c);
	}
	cursor_get_str(&c, rank->endpoint, sizeof(rank->endpoint));
	cursor_get_str(&c, rank->pool, sizeof(rank->pool));
	cursor_get_str(&c, rank->summary, sizeof(rank->summary));
	wire_text_clean(rank->endpoint);
	wire_text_clean(rank->pool);
	wire_text_clean(rank->summary);
	in->bad |= c.bad;
}

bool rank_same_place(const struct bootstrap_rank *a, const struct bootstrap_rank *b)
{
	return memcmp(a->rank, b->rank, sizeof(a->rank)) == 0;
}

static int check_endpoint(const char *endpoint)
{
	char plain[LINK_ENDPOINT_MAX];

	/* the key behind '#' is the dialler's to judge */
	snprintf(plain, sizeof(plain), "%.*s", (int)strcspn(endpoint, "#"), endpoint);
	return err_pass(link_endpoint_check(plain));
}

int board_check(const char *group, const struct bootstrap_rank *rank)
{
	if (!group[0] || strlen(group) >= BOOTSTRAP_GROUP_MAX)
		return err_raise(ERR_INVAL, "group: 1 to %u bytes",
				 BOOTSTRAP_GROUP_MAX - 1);
	for (unsigned int i = 0; rank && i < BOOTSTRAP_AXES; i++) {
		if (rank->size[i] < 1 || rank->size[i] > BOOTSTRAP_SIZE_MAX)
			return err_raise(ERR_INVAL, "%s_size: %u, must be 1 to %u",
					 axis_names[i], rank->size[i],
					 BOOTSTRAP_SIZE_MAX);
		if (rank->rank[i] >= rank->size[i])
			return err_raise(ERR_INVAL,
					 "%s_rank: %u, must be under %s_size %u",
					 axis_names[i], rank->rank[i], axis_names[i],
					 rank->size[i]);
	}
	return rank ? err_pass(check_endpoint(rank->endpoint)) : 0;
}

bool bootstrap_complete(const struct bootstrap_rank *ranks, unsigned int count)
{
	uint64_t places = 1;

	if (!count)
		return false;
	for (unsigned int i = 0; i < BOOTSTRAP_AXES; i++) {
		places *= ranks[0].size[i];
		if (places > count) /* two sizes at most: no overflow */
			return false;
	}
	/* the board holds each place once */
	return places == count;
}

/* ---- owners and groups ---- */

static struct board_owner *bootstrap_board_owner_find(struct board *board,
						      uint64_t session,
						      const struct peer *peer)
{
	struct board_owner *owner;

	list_foreach(owner, &board->owners, link) {
		if (owner->session == session && owner->peer == peer)
			return owner;
	}
	return NULL;
}

static struct board_owner *owner_get(struct board *board, uint64_t session,
				     const struct peer *peer)
{
	struct board_owner *owner = bootstrap_board_owner_find(board, session, peer);

	if (owner)
		return owner;
	owner = mem_zalloc(sizeof(*owner));
	if (!owner)
		return NULL;
	owner->session = session;
	owner->peer = peer;
	list_init(&owner->entries);
	list_push_back(&board->owners, &owner->link);
	return owner;
}

static void owner_put(struct board_owner *owner)
{
	if (owner->count)
		return;
	list_remove(&owner->link);
	mem_free(owner);
}

static struct board_group *bootstrap_board_group_get(struct board *board,
						     const char *name)
{
	struct board_group *group = strmap_get(&board->groups, name);

	if (group)
		return group;
	group = mem_zalloc(sizeof(*group));
	if (!group)
		return NULL;
	list_init(&group->entries);
	group->name = mem_strdup(name);
	if (!group->name || strmap_put(&board->groups, name, group) < 0) {
		mem_free(group->name);
		mem_free(group);
		return NULL;
	}
	return group;
}

static void group_put(struct board *board, struct board_group *group)
{
	if (group->count)
		return;
	strmap_remove(&board->groups, group->name);
	mem_free(group->name);
	mem_free(group);
}

const struct board_group *board_group(const struct board *board, const char *group)
{
	return strmap_get(&board->groups, group);
}

/* ---- entries ---- */

void board_init(struct board *board, const struct bootstrap_options *options)
{
	strmap_init(&board->groups);
	list_init(&board->owners);
	board->max = options->ranks_max;
	board->owner_max = options->owner_ranks_max;
	board->group_bytes_max = wire_body_cap(WIRE_T_ROUTE);
	if (board->group_bytes_max > options->message_bytes - WIRE_HEADER_BYTES)
		board->group_bytes_max = options->message_bytes - WIRE_HEADER_BYTES;
	board->group_bytes_max -= ROUTE_FIXED_BYTES;
}

static void bootstrap_board_entry_free(struct board *board, struct board_entry *entry)
{
	struct board_owner *owner;
	struct board_group *group;

	assert(entry); /* an owner's count is the length of its list */
	owner = entry->owner;
	group = entry->group;
	list_remove(&entry->of_owner);
	list_remove(&entry->of_group);
	owner->count--;
	group->count--;
	group->bytes -= rank_bytes(&entry->rank);
	board->count--;
	board->remote_count -= owner->peer != NULL;
	mem_free(entry);
	owner_put(owner);
	group_put(board, group);
}

void board_fini(struct board *board)
{
	struct board_owner *owner;
	struct board_entry *entry;

	/* the owner is freed with its last entry */
	while ((owner = list_first(&board->owners, struct board_owner, link))) {
		entry = list_first(&owner->entries, struct board_entry, of_owner);
		bootstrap_board_entry_free(board, entry);
	}
	strmap_fini(&board->groups);
}

static struct board_entry *entry_find(const struct board_group *group,
				      const struct bootstrap_rank *rank)
{
	struct board_entry *entry;

	list_foreach(entry, &group->entries, of_group) {
		if (rank_same_place(&entry->rank, rank))
			return entry;
	}
	return NULL;
}

static int check_sizes(const struct board_group *group, const struct board_entry *old,
		       const struct bootstrap_rank *rank)
{
	const struct board_entry *first =
		list_first(&group->entries, struct board_entry, of_group);

	if (!first || (first == old && group->count == 1))
		return 0;
	for (unsigned int i = 0; i < BOOTSTRAP_AXES; i++) {
		if (first->rank.size[i] != rank->size[i])
			return err_raise(
				ERR_INVAL,
				"%s_size: %u, and group '%s' has ranks of %s_size %u",
				axis_names[i], rank->size[i], group->name, axis_names[i],
				first->rank.size[i]);
	}
	return 0;
}

static int bootstrap_board_check_room(const struct board *board,
				      const struct board_owner *owner,
				      const struct board_group *group,
				      const struct board_entry *old,
				      const struct bootstrap_rank *rank)
{
	size_t bytes =
		group->bytes + rank_bytes(rank) - (old ? rank_bytes(&old->rank) : 0);

	if (old && old->owner != owner)
		return err_raise(ERR_EXIST,
				 "group '%s': the rank is published by %s%.100s",
				 group->name, old->owner->peer ? "" : "another session",
				 old->owner->peer ? old->owner->peer->endpoint : "");
	if (!old && group->count >= BOOTSTRAP_RANKS_MAX)
		return err_raise(ERR_LIMIT, "group '%s': %u ranks, the cap", group->name,
				 group->count);
	if (bytes > board->group_bytes_max)
		return err_raise(ERR_LIMIT,
				 "group '%s': over the %zu bytes of one message",
				 group->name, board->group_bytes_max);
	if (!old && owner->count >= board->owner_max)
		return err_raise(ERR_LIMIT,
				 "%u ranks are published by this owner, the cap",
				 owner->count);
	if (!old && board->count >= board->max)
		return err_raise(ERR_LIMIT, "%u ranks are published, the cap",
				 board->count);
	return 0;
}

static int entry_put(struct board *board, struct board_owner *owner,
		     struct board_group *group, const struct bootstrap_rank *rank,
		     uint64_t end_ns)
{
	struct board_entry *entry = entry_find(group, rank);
	int r;

	r = bootstrap_board_check_room(board, owner, group, entry, rank);
	if (r == 0)
		r = check_sizes(group, entry, rank);
	if (r < 0)
		return err_pass(r);
	if (!entry) {
		entry = mem_zalloc(sizeof(*entry));
		if (!entry)
			return err_pass(-ENOMEM);
		entry->owner = owner;
		entry->group = group;
		list_push_back(&owner->entries, &entry->of_owner);
		list_push_back(&group->entries, &entry->of_group);
		owner->count++;
		group->count++;
		board->count++;
		board->remote_count += owner->peer != NULL;
	} else {
		group->bytes -= rank_bytes(&entry->rank);
	}
	entry->rank = *rank;
	entry->end_ns = end_ns;
	group->bytes += rank_bytes(rank);
	return 0;
}

int board_put(struct board *board, uint64_t session, const struct peer *peer,
	      const char *group, const struct bootstrap_rank *rank, uint64_t end_ns)
{
	struct board_owner *owner;
	struct board_group *where;
	int r;

	assert(rank);
	r = board_check(group, rank);
	if (r < 0)
		return err_pass(r);
	owner = owner_get(board, session, peer);
	if (!owner)
		return err_pass(-ENOMEM);
	where = bootstrap_board_group_get(board, group);
	if (!where) {
		owner_put(owner);
		return err_pass(-ENOMEM);
	}
	r = entry_put(board, owner, where, rank, end_ns);
	/* they were perhaps made for nothing */
	owner_put(owner);
	group_put(board, where);
	return err_pass(r);
}

void board_take(struct board *board, uint64_t session, const struct peer *peer,
		const char *group, const struct bootstrap_rank *rank)
{
	struct board_group *where = strmap_get(&board->groups, group);
	struct board_entry *entry = where ? entry_find(where, rank) : NULL;

	if (entry && entry->owner->session == session && entry->owner->peer == peer)
		bootstrap_board_entry_free(board, entry);
}

void board_owner_gone(struct board *board, uint64_t session, const struct peer *peer)
{
	struct board_owner *owner = bootstrap_board_owner_find(board, session, peer);

	for (unsigned int left = owner ? owner->count : 0; left > 0; left--)
		bootstrap_board_entry_free(
			board, list_first(&owner->entries, struct board_entry, of_owner));
}

void board_expire(struct board *board, uint64_t now_ns)
{
	struct board_owner *owner;
	struct board_entry *entry;

	list_foreach_safe(owner, &board->owners, link) {
		unsigned int left = owner->count;

		/* the owner goes with its last entry: count, do not look at the list */
		for (entry = list_first(&owner->entries, struct board_entry, of_owner);
		     left > 0; left--) {
			struct list *next = entry->of_owner.next;

			if (entry->end_ns <= now_ns)
				bootstrap_board_entry_free(board, entry);
			entry = list_entry(next, struct board_entry, of_owner);
		}
	}
}
