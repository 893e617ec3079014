/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The board's entries. An entry hangs in its group, by place and in the order of change,
 * and in its owner's list, so the end of a daemon takes down its own without a search.
 * Groups exist while they have entries or watchers, owners while they have either.
 *
 * An owner is known by the instance of its daemon. When its peer goes down it is away,
 * and its watchers go; when the same instance says something again, it is back. Another
 * instance at the same endpoint, of the same key, is its successor: a place of one that
 * is away is given to it. Others are told to wait (ERR_BUSY).
 *
 * Groups whose names begin with "kvd." say what daemons are. There a worker is the
 * publisher's own instance: no daemon can speak for another.
 */
#include "daemon/cluster/board_impl.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/own_groups.h"
#include "daemon/handshake/handshake.h"

static const struct board_options defaults = {
	.entries_max = 65536,
	.owner_entries_max = 1024,
	.group_entries_max = 16384,
	.watches_max = 65536,
	.owner_watches_max = 4096,
	.message_bytes = WIRE_FRAME_MAX,
	.lease_max_ns = 600 * LOOP_NS_PER_S,
	.tell_after_ns = 10 * LOOP_NS_PER_MS,
	.young_ns = 15 * LOOP_NS_PER_S,
};

void board_options_default(struct board_options *options)
{
	*options = defaults;
}

/* ---- owners and groups ---- */

static uint64_t peer_key(const struct peer *peer)
{
	return (uintptr_t)peer;
}

/* Its daemon is there again. */
static struct board_owner *board_owner_back(const struct board *board,
					    const struct peer *peer)
{
	struct board_owner *owner;

	list_foreach(owner, &board->away, away) {
		if (strcmp(owner->known_as, peer->known_as) == 0 &&
		    memcmp(owner->instance, peer->instance, sizeof(owner->instance)) == 0)
			return owner;
	}
	return NULL;
}

static struct board_owner *board_owner_new(struct board *board)
{
	struct board_owner *owner = mem_zalloc(sizeof(*owner));

	if (!owner)
		return NULL;
	list_init(&owner->items);
	list_init(&owner->watchers);
	list_init(&owner->away);
	list_push_back(&board->owners, &owner->link);
	return owner;
}

static struct board_owner *board_owner_of_peer(struct board *board, struct peer *peer)
{
	struct board_owner *owner = idmap_get(&board->of_peer, peer_key(peer));

	if (owner)
		return owner;
	owner = board_owner_back(board, peer);
	if (!owner)
		owner = board_owner_new(board);
	if (!owner)
		return NULL;
	if (idmap_put(&board->of_peer, peer_key(peer), owner) < 0) {
		board_owner_idle(board, owner);
		return NULL;
	}
	list_remove(&owner->away);
	owner->peer = peer;
	memcpy(owner->instance, peer->instance, sizeof(owner->instance));
	memcpy(owner->instance_text, peer->instance_text, sizeof(owner->instance_text));
	memcpy(owner->endpoint, peer->endpoint, sizeof(owner->endpoint));
	memcpy(owner->known_as, peer->known_as, sizeof(owner->known_as));
	return owner;
}

struct board_owner *board_owner_of(struct board *board, struct peer *peer,
				   struct board_local *local)
{
	if (peer)
		return board_owner_of_peer(board, peer);
	if (!local->owner) {
		local->owner = board_owner_new(board);
		if (local->owner)
			local->owner->local = local;
	}
	return local->owner;
}

void board_owner_idle(struct board *board, struct board_owner *owner)
{
	if (owner->item_count || owner->watch_count)
		return;
	if (owner->local)
		owner->local->owner = NULL;
	if (owner->peer)
		idmap_remove(&board->of_peer, peer_key(owner->peer));
	list_remove(&owner->away);
	list_remove(&owner->link);
	mem_free(owner);
}

struct board_group *board_group_find(const struct board *board, const char *name)
{
	return strmap_get(&board->groups, name);
}

struct board_group *board_group_get(struct board *board, const char *name)
{
	struct board_group *group = board_group_find(board, name);

	if (group)
		return group;
	group = mem_zalloc(sizeof(*group));
	if (!group)
		return NULL;
	group->name = mem_strdup(name);
	if (!group->name || strmap_put(&board->groups, name, group) < 0) {
		mem_free(group->name);
		mem_free(group);
		return NULL;
	}
	roster_init(&group->roster, board->next_rev);
	list_init(&group->watchers);
	list_init(&group->due_link);
	return group;
}

void board_group_idle(struct board *board, struct board_group *group)
{
	if (group->roster.count || !list_empty(&group->watchers))
		return;
	/* one that begins anew has revisions that this one never had */
	if (group->roster.rev >= board->next_rev)
		board->next_rev = group->roster.rev + 1;
	strmap_remove(&board->groups, group->name);
	list_remove(&group->due_link);
	roster_fini(&group->roster);
	mem_free(group->name);
	mem_free(group);
}

/* ---- entries ---- */

static void board_item_free(struct board *board, struct board_item *item)
{
	struct board_group *group = item->group;

	roster_drop(&group->roster, item->entry);
	charge_drop(&item->charge);
	list_remove(&item->link);
	item->owner->item_count--;
	board->count--;
	mem_free(item);
	board_group_changed(board, group);
	board_group_idle(board, group);
}

static struct board_item *board_item_new(struct board_owner *owner,
					 struct board_group *group)
{
	struct board_item *item = mem_zalloc(sizeof(*item));

	if (!item)
		return NULL;
	item->owner = owner;
	item->group = group;
	list_push_back(&owner->items, &item->link);
	owner->item_count++;
	return item;
}

static void board_item_to(struct board_item *item, struct board_owner *owner)
{
	struct board_owner *before = item->owner;

	list_remove(&item->link);
	before->item_count--;
	item->owner = owner;
	list_push_back(&owner->items, &item->link);
	owner->item_count++;
}

static bool is_successor(const struct board_owner *owner,
			 const struct board_owner *before)
{
	return !before->peer && !before->local && owner->peer &&
	       strcmp(owner->endpoint, before->endpoint) == 0 &&
	       strcmp(owner->known_as, before->known_as) == 0;
}

static int board_check_holder(const struct board_owner *owner,
			      const struct board_owner *holder, const struct place *place)
{
	char text[PLACE_TEXT_MAX];

	if (holder == owner || is_successor(owner, holder))
		return 0;
	if (!holder->local && !holder->peer)
		return err_raise(ERR_BUSY,
				 "%s: the rank is published by %.100s, which is away",
				 place_text(place, text), holder->endpoint);
	return err_raise(ERR_EXIST, "%s: the rank is published by %s",
			 place_text(place, text),
			 holder->local ? "this daemon" : holder->endpoint);
}

static int board_check_caps(const struct board *board, const struct board_owner *owner,
			    const struct board_group *group, const struct place *place)
{
	if (!owner->local && owner->item_count >= board->options.owner_entries_max)
		return err_raise(ERR_LIMIT,
				 "group '%s': %u ranks are published by this daemon, the "
				 "cap",
				 place->group, owner->item_count);
	if (board->count >= board->options.entries_max)
		return err_raise(ERR_LIMIT, "group '%s': %u ranks are published, the cap",
				 place->group, board->count);
	if (group && group->roster.count >= board->options.group_entries_max)
		return err_raise(ERR_LIMIT, "group '%s': %u ranks, the cap", place->group,
				 group->roster.count);
	return 0;
}

static int board_check_put(const struct board *board, const struct board_owner *owner,
			   const struct place *place, const char *record,
			   const struct board_item *item)
{
	const struct board_group *group = board_group_find(board, place->group);
	int r = 0;

	if (!owner->local && own_groups_are(place->group) &&
	    strcmp(place->worker, owner->instance_text) != 0)
		return err_raise(ERR_PERM,
				 "group '%s': a daemon says of itself alone what it is",
				 place->group);
	if (item)
		r = board_check_holder(owner, item->owner, place);
	else if (!record)
		r = err_raise(ERR_NOTFOUND, "group '%s': there is no such rank",
			      place->group);
	else
		r = board_check_caps(board, owner, group, place);
	return err_pass(r);
}

static struct account *account_of(const struct board_owner *owner)
{
	const struct remote *remote = owner->peer ? owner->peer->user : NULL;

	return remote ? remote->account : NULL;
}

/* Its account has what it takes; of an entry that grows, the difference. */
static int board_charge(struct board_item *item, const char *record, const char *load)
{
	size_t bytes = roster_bytes(record ? record : item->entry->record,
				    load	  ? load
				    : item->entry ? item->entry->load
						  : NULL);

	bytes += sizeof(*item);
	if (!item->charge.account)
		return err_pass(charge_take(&item->charge, account_of(item->owner),
					    ACCOUNT_BOARD, bytes));
	if (bytes <= item->charge.bytes) {
		charge_less(&item->charge, item->charge.bytes - bytes);
		return 0;
	}
	return err_pass(charge_more(&item->charge, bytes - item->charge.bytes));
}

static int board_put_new(struct board *board, struct board_owner *owner,
			 const struct place *place, const char *record, const char *load)
{
	struct board_group *group = board_group_get(board, place->group);
	struct board_item *item = group ? board_item_new(owner, group) : NULL;
	int r = item ? 0 : -ENOMEM;

	if (r == 0)
		r = board_charge(item, record, load);
	if (r >= 0)
		r = roster_put(&group->roster, place, record, load, &item->entry);
	if (r >= 0) {
		item->entry->user = item;
		board->count++;
		board_group_changed(board, group);
		return 0;
	}
	if (item) {
		charge_drop(&item->charge);
		list_remove(&item->link);
		owner->item_count--;
		mem_free(item);
	}
	if (group)
		board_group_idle(board, group);
	return err_pass(r);
}

static int board_put_again(struct board *board, struct board_owner *owner,
			   struct board_item *item, const char *record, const char *load)
{
	struct board_owner *before = item->owner;
	int r;

	if (before != owner) {
		charge_drop(&item->charge);
		board_item_to(item, owner);
	}
	item->left = false;
	r = board_charge(item, record, load);
	if (r >= 0)
		r = roster_put(&item->group->roster, &item->entry->place, record, load,
			       &item->entry);
	if (r > 0)
		board_group_changed(board, item->group);
	if (before != owner) {
		board_owner_idle(board, before);
		if (r < 0)
			board_item_free(board, item);
	}
	return r < 0 ? err_pass(r) : 0;
}

int board_put(struct board *board, struct board_owner *owner, const struct place *place,
	      const char *record, const char *load, uint64_t lease_ns)
{
	const struct board_group *group = board_group_find(board, place->group);
	struct roster_entry *entry = group ? roster_find(&group->roster, place) : NULL;
	struct board_item *item = entry ? entry->user : NULL;
	int r = place_check(place);

	if (r == 0)
		r = board_check_put(board, owner, place, record, item);
	if (r < 0)
		return err_pass(r);
	if (lease_ns > board->options.lease_max_ns)
		lease_ns = board->options.lease_max_ns;
	if (lease_ns > owner->lease_ns || !owner->item_count)
		owner->lease_ns = lease_ns;
	return item ? err_pass(board_put_again(board, owner, item, record, load))
		    : err_pass(board_put_new(board, owner, place, record, load));
}

void board_take(struct board *board, struct board_owner *owner, const struct place *place)
{
	const struct board_group *group = board_group_find(board, place->group);
	struct roster_entry *entry = group ? roster_find(&group->roster, place) : NULL;
	struct board_item *item = entry ? entry->user : NULL;

	if (item && item->owner == owner)
		board_item_free(board, item);
}

/* ---- daemons come and go ---- */

void board_owner_gone(struct board *board, struct board_owner *owner)
{
	struct board_item *item;
	struct board_watcher *watcher;

	list_foreach_safe(watcher, &owner->watchers, of_owner)
		board_watcher_free(board, watcher);
	list_foreach_safe(item, &owner->items, link)
		board_item_free(board, item);
	board_owner_idle(board, owner);
}

/* When the next lease of what has been left is over. */
static void away_plan(struct board *board)
{
	uint64_t next_ns = UINT64_MAX, now_ns = loop_now_ns(board->loop);
	const struct board_owner *owner;

	list_foreach(owner, &board->owners, link) {
		if (owner->until_ns && owner->until_ns < next_ns)
			next_ns = owner->until_ns;
	}
	if (next_ns != UINT64_MAX)
		loop_timer_start(&board->away_timer,
				 next_ns > now_ns ? next_ns - now_ns : 0);
}

/* What it has not put again since it was away. The owner may be freed. */
static void board_owner_expire(struct board *board, struct board_owner *owner)
{
	struct board_item *item;
	unsigned int count = 0;

	owner->until_ns = 0;
	list_foreach_safe(item, &owner->items, link) {
		if (!item->left)
			continue;
		board_item_free(board, item);
		count++;
	}
	if (count)
		log_info("cluster", owner->endpoint, "entries without a lease are gone",
			 "count=%u", count);
	board_owner_idle(board, owner);
}

static void on_away_timer(struct loop_timer *timer)
{
	struct board *board = container_of(timer, struct board, away_timer);
	uint64_t now_ns = loop_now_ns(board->loop);
	struct board_owner *owner;

	list_foreach_safe(owner, &board->owners, link) {
		if (owner->until_ns && owner->until_ns <= now_ns)
			board_owner_expire(board, owner);
	}
	away_plan(board);
}

void board_peer_down(struct board *board, const struct peer *peer)
{
	struct board_owner *owner = idmap_remove(&board->of_peer, peer_key(peer));
	struct board_watcher *watcher;
	struct board_item *item;

	if (!owner)
		return;
	list_foreach_safe(watcher, &owner->watchers, of_owner)
		board_watcher_free(board, watcher);
	list_foreach(item, &owner->items, link)
		item->left = true;
	owner->peer = NULL;
	list_push_back(&board->away, &owner->away);
	owner->until_ns = loop_now_ns(board->loop) + owner->lease_ns;
	board_owner_idle(board, owner);
	away_plan(board);
}

/* ---- messages ---- */

static void put_ranks(struct place *place, uint32_t tp, uint32_t pp, uint32_t dp,
		      uint32_t cp)
{
	place->rank[PLACE_TP] = tp;
	place->rank[PLACE_PP] = pp;
	place->rank[PLACE_DP] = dp;
	place->rank[PLACE_CP] = cp;
}

/* Longer ones become what place_check() refuses. */
static void put_names(struct place *place, const char *group, const char *worker)
{
	size_t group_len = strlen(group), worker_len = strlen(worker);

	place->group[0] = place->worker[0] = '\0';
	if (group_len >= sizeof(place->group) || worker_len >= sizeof(place->worker))
		return;
	memcpy(place->group, group, group_len + 1);
	memcpy(place->worker, worker, worker_len + 1);
}

/* A text of the wire: NULL of no bytes; outcome 1: too long, or a NUL is in it. */
static int board_text(const struct wire_blob *blob, size_t max, char *text,
		      const char **text_p)
{
	*text_p = NULL;
	if (!blob->len)
		return 0;
	if (blob->len >= max || memchr(blob->data, '\0', blob->len))
		return 1;
	memcpy(text, blob->data, blob->len);
	text[blob->len] = '\0';
	*text_p = text;
	return 0;
}

static int board_on_put(struct board *board, struct board_owner *owner,
			struct cursor *body)
{
	char record[DIRECTORY_RECORD_MAX + 1], load[DIRECTORY_LOAD_MAX + 1];
	const char *record_text, *load_text;
	struct wire_board_ack ack = {.code = 0};
	uint8_t buf[sizeof(ack) + 16];
	struct wire_board_put m;
	struct place place;
	struct cursor c;
	int r = wire_board_put_get(body, &m);

	if (r < 0)
		return err_pass(r);
	put_names(&place, m.group, m.worker);
	put_ranks(&place, m.tp, m.pp, m.dp, m.cp);
	if (board_text(&m.record, sizeof(record), record, &record_text) > 0 ||
	    board_text(&m.load, sizeof(load), load, &load_text) > 0)
		r = err_raise(ERR_TOOBIG, "record and load: at most %u and %u bytes",
			      DIRECTORY_RECORD_MAX, DIRECTORY_LOAD_MAX);
	else
		r = board_put(board, owner, &place, record_text, load_text,
			      m.lease_ms < UINT32_MAX ? m.lease_ms * LOOP_NS_PER_MS
						      : UINT64_MAX);
	ack.cookie = m.cookie;
	if (r < 0) {
		ack.code = (uint32_t)err_last()->code;
		snprintf(ack.text, sizeof(ack.text), "%s", err_last()->text);
		err_clear();
	}
	cursor_write(&c, buf, sizeof(buf));
	if (wire_board_ack_put(&c, &ack) < 0 ||
	    board_say(owner, WIRE_T_BOARD_ACK, buf, c.pos) < 0)
		err_clear(); /* it puts again */
	return 0;
}

static int board_on_drop(struct board *board, struct board_owner *owner,
			 struct cursor *body)
{
	struct wire_board_drop m;
	struct place place;
	int r = wire_board_drop_get(body, &m);

	if (r < 0)
		return err_pass(r);
	put_names(&place, m.group, m.worker);
	put_ranks(&place, m.tp, m.pp, m.dp, m.cp);
	board_take(board, owner, &place);
	return 0;
}

int board_hear(struct board *board, struct board_owner *owner, unsigned int type,
	       struct cursor *body)
{
	switch (type) {
	case WIRE_T_BOARD_PUT:
		return err_pass(board_on_put(board, owner, body));
	case WIRE_T_BOARD_DROP:
		return err_pass(board_on_drop(board, owner, body));
	case WIRE_T_BOARD_WATCH:
		return err_pass(board_on_watch(board, owner, body));
	case WIRE_T_BOARD_UNWATCH:
		return err_pass(board_on_unwatch(board, owner, body));
	default:
		return err_pass(board_on_route(board, owner, type, body));
	}
}

int board_on_message(struct board *board, struct peer *peer, unsigned int type,
		     struct cursor *body)
{
	struct board_owner *owner = board_owner_of(board, peer, NULL);
	int r;

	if (!owner) {
		err_clear(); /* it puts, asks or watches again */
		return 0;
	}
	r = board_hear(board, owner, type, body);
	board_owner_idle(board, owner);
	return r < 0 ? err_pass(r) : 0;
}

int board_say(struct board_owner *owner, unsigned int type, const void *body, size_t len)
{
	if (owner->local)
		return err_pass(board_local_tell(owner->local, type, body, len));
	return err_pass(peer_send(owner->peer, (enum wire_type)type, body, len));
}

/* ---- the whole ---- */

int board_new(struct loop *loop, const struct board_options *options,
	      struct board **board_p)
{
	struct board *board = mem_zalloc(sizeof(*board));

	*board_p = board;
	if (!board)
		return err_pass(-ENOMEM);
	board->loop = loop;
	board->options = options ? *options : defaults;
	strmap_init(&board->groups);
	idmap_init(&board->of_peer);
	list_init(&board->owners);
	list_init(&board->away);
	list_init(&board->locals);
	/* below 2^53, with room for what changes */
	board->next_rev = (loop_random_u64(loop) >> 16) + 1;
	board->young_until_ns = loop_now_ns(loop) + board->options.young_ns;
	loop_timer_init(&board->away_timer, loop, on_away_timer);
	board_tell_init(board);
	return 0;
}

void board_free(struct board *board)
{
	struct board_owner *owner;

	if (!board)
		return;
	assert(list_empty(&board->locals));
	list_foreach_safe(owner, &board->owners, link)
		board_owner_gone(board, owner);
	loop_timer_stop(&board->away_timer);
	board_tell_fini(board);
	assert(board->count == 0);
	idmap_fini(&board->of_peer);
	strmap_fini(&board->groups);
	mem_free(board);
}

unsigned int board_count(const struct board *board)
{
	return board->count;
}

unsigned int board_watches(const struct board *board)
{
	return board->watch_count;
}
