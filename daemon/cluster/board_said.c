/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this daemon publishes on boards. What a site is owed is sent in a later turn, and
 * as its line has room: of many changes of one entry the last is. A publication is done
 * when every site that is up has it, and at least one. It is refused when one refuses it
 * before that (a place that somebody has: twice), and then taken back where it was
 * accepted. What is refused later, because somebody took the place while this daemon was
 * away, is put again every third of the lease.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/board_directory_impl.h"

#define PUT_BYTES (DIRECTORY_RECORD_MAX + DIRECTORY_LOAD_MAX + BOARD_NAMES_MAX + 128u)
#define CONTEST_NS (1500 * LOOP_NS_PER_MS) /* a place that somebody has, once more */
#define SAY_AGAIN_NS (20 * LOOP_NS_PER_MS) /* to a line that was full */

enum { SAID_RECORD = 1, SAID_LOAD = 2 };

/* Negative: the line has no room now. */
static int said_put(struct board_site *site, struct board_said *said)
{
	struct wire_board_put m = {.cookie = said->cookie,
				   .lease_ms = site->directory->lease_ns / LOOP_NS_PER_MS,
				   .tp = said->place.rank[PLACE_TP],
				   .pp = said->place.rank[PLACE_PP],
				   .dp = said->place.rank[PLACE_DP],
				   .cp = said->place.rank[PLACE_CP]};
	uint8_t body[PUT_BYTES];
	struct cursor c;
	int r;

	snprintf(m.group, sizeof(m.group), "%s", said->place.group);
	snprintf(m.worker, sizeof(m.worker), "%s", said->place.worker);
	if (said->owed[site->index] & SAID_RECORD)
		m.record = (struct wire_blob){said->record, strlen(said->record)};
	if (said->owed[site->index] & SAID_LOAD && said->load)
		m.load = (struct wire_blob){said->load, strlen(said->load)};
	cursor_write(&c, body, sizeof(body));
	r = wire_board_put_put(&c, &m);
	if (r == 0)
		r = site->own
			    ? board_local_say(&site->local, WIRE_T_BOARD_PUT, body, c.pos)
			    : peer_send(site->peer, WIRE_T_BOARD_PUT, body, c.pos);
	if (r < 0)
		return err_pass(r);
	site->directory->state.puts++;
	said->owed[site->index] = 0;
	if (!(said->taken & 1u << site->index))
		board_tick_start(site->directory); /* it may stay without an answer */
	return 0;
}

static void board_on_say(struct loop_defer *defer)
{
	struct board_directory *d = container_of(defer, struct board_directory, say);
	struct board_said *said;

	for (unsigned int i = 0; i < d->count; i++) {
		if (!d->sites[i].up)
			continue;
		list_foreach(said, &d->said, link) {
			if (!said->owed[i] || said_put(&d->sites[i], said) == 0)
				continue;
			err_clear();
			loop_timer_start(&d->say_timer, SAY_AGAIN_NS);
			break;
		}
	}
}

static void on_say_timer(struct loop_timer *timer)
{
	struct board_directory *d =
		container_of(timer, struct board_directory, say_timer);

	loop_defer(d->loop, &d->say);
}

static void said_owe(struct board_said *said, unsigned int i, unsigned int what)
{
	said->owed[i] |= (uint8_t)what;
	loop_defer(said->directory->loop, &said->directory->say);
}

static void said_drop(struct board_site *site, const struct board_said *said)
{
	struct wire_board_drop m = {.tp = said->place.rank[PLACE_TP],
				    .pp = said->place.rank[PLACE_PP],
				    .dp = said->place.rank[PLACE_DP],
				    .cp = said->place.rank[PLACE_CP]};
	uint8_t body[BOARD_NAMES_MAX + 64];
	struct cursor c;

	if (!site->up)
		return;
	snprintf(m.group, sizeof(m.group), "%s", said->place.group);
	snprintf(m.worker, sizeof(m.worker), "%s", said->place.worker);
	cursor_write(&c, body, sizeof(body));
	if (wire_board_drop_put(&c, &m) < 0 ||
	    board_site_say(site, WIRE_T_BOARD_DROP, body, c.pos) < 0)
		err_clear(); /* it goes with the lease */
}

struct said_at {
	char group[PLACE_GROUP_MAX];
	struct place_key place;
};

static size_t said_at(const struct place *place, struct said_at *key)
{
	memset(key, 0, sizeof(*key));
	memcpy(key->group, place->group, strlen(place->group));
	return offsetof(struct said_at, place) + place_key(place, &key->place);
}

static void said_free(struct board_said *said)
{
	struct board_directory *d = said->directory;
	struct said_at key;
	size_t len = said_at(&said->place, &key);

	for (unsigned int i = 0; i < d->count; i++) {
		if (!(said->refused & 1u << i))
			said_drop(&d->sites[i], said);
	}
	if (said->publication)
		said->publication->impl = NULL;
	strmap_remove_bytes(&d->said_at, &key, len);
	list_remove(&said->link);
	mem_free(said->record);
	mem_free(said->load);
	mem_free(said);
}

static void said_finish(struct board_said *said, const struct err *why)
{
	struct publication *publication = said->publication;

	said->done = true;
	if (why)
		said_free(said);
	if (publication->on_done)
		publication->on_done(publication, why);
}

/* Has every site that is up taken it, and one at least? */
static void said_look(struct board_said *said)
{
	const struct board_directory *d = said->directory;

	if (said->done || !said->taken)
		return;
	for (unsigned int i = 0; i < d->count; i++) {
		if (d->sites[i].up && !(said->taken & 1u << i))
			return;
	}
	said_finish(said, NULL);
}

static bool text_set(char **to, const char *text)
{
	char *copy = mem_strdup(text);

	if (!copy)
		return false;
	mem_free(*to);
	*to = copy;
	return true;
}

static int board_check_texts(const char *record, const char *load)
{
	if (record && strlen(record) > DIRECTORY_RECORD_MAX)
		return err_raise(ERR_LIMIT, "record: %zu bytes, at most %u",
				 strlen(record), DIRECTORY_RECORD_MAX);
	if (load && strlen(load) > DIRECTORY_LOAD_MAX)
		return err_raise(ERR_LIMIT, "load: %zu bytes, at most %u", strlen(load),
				 DIRECTORY_LOAD_MAX);
	return 0;
}

static void said_owe_all(struct board_said *said)
{
	for (unsigned int i = 0; i < said->directory->count; i++)
		said_owe(said, i, SAID_RECORD | SAID_LOAD);
}

static int said_new(struct board_directory *d, const struct place *place,
		    const char *record, const char *load, struct board_said **said_p)
{
	struct board_said *said = mem_zalloc(sizeof(*said));
	struct said_at key;
	size_t len = said_at(place, &key);

	if (!said)
		return err_pass(-ENOMEM);
	if (!text_set(&said->record, record) || (load && !text_set(&said->load, load)) ||
	    strmap_put_bytes(&d->said_at, &key, len, said) < 0) {
		mem_free(said->record);
		mem_free(said->load);
		mem_free(said);
		return err_pass(-ENOMEM);
	}
	said->place = *place;
	said->directory = d;
	said->cookie = ++d->cookies;
	list_push_back(&d->said, &said->link);
	*said_p = said;
	return 0;
}

/* The same place: another record and load, as if it were new. */
static int said_replace(struct board_said *said, const char *record, const char *load)
{
	char *fresh = load ? mem_strdup(load) : NULL;

	if ((load && !fresh) || !text_set(&said->record, record)) {
		mem_free(fresh);
		return err_pass(-ENOMEM);
	}
	mem_free(said->load);
	said->load = fresh;
	said->taken = said->contested = 0;
	said->done = false;
	return 0;
}

int board_publish(struct directory *directory, struct publication *publication,
		  const struct place *place, const char *record, const char *load)
{
	struct board_directory *d = board_directory_of(directory);
	struct board_said *before = publication->impl, *said;
	char text[PLACE_TEXT_MAX];
	struct said_at key;
	int r = place_check(place);

	if (r == 0)
		r = board_check_texts(record, load);
	if (r < 0)
		return err_pass(r);
	said = strmap_get_bytes(&d->said_at, &key, said_at(place, &key));
	if (said && said != before)
		return err_raise(ERR_EXIST, "%s: this daemon has it already",
				 place_text(place, text));
	r = said ? said_replace(said, record, load)
		 : said_new(d, place, record, load, &said);
	if (r < 0)
		return err_pass(r);
	if (before && before != said) {
		before->publication = NULL;
		said_free(before);
	}
	said->publication = publication;
	publication->impl = said;
	said_owe_all(said);
	return 0;
}

int board_update(struct publication *publication, const char *record, const char *load)
{
	struct board_said *said = publication->impl;
	int r = board_check_texts(record, load);

	if (r < 0)
		return err_pass(r);
	if (!said)
		return 0; /* it was refused, and on_done is on its way */
	if ((record && !text_set(&said->record, record)) ||
	    (load && !text_set(&said->load, load)))
		return err_pass(-ENOMEM);
	for (unsigned int i = 0; i < said->directory->count; i++) {
		bool whole = !(said->taken & 1u << i);

		said_owe(said, i,
			 (whole || record ? SAID_RECORD : 0) |
				 (whole || load ? SAID_LOAD : 0));
	}
	return 0;
}

void board_withdraw(struct publication *publication)
{
	struct board_said *said = publication->impl;

	if (said)
		said_free(said);
}

int board_said_on_ack(struct board_site *site, struct cursor *body)
{
	const unsigned int bit = 1u << site->index;
	struct board_said *said, *found = NULL;
	struct wire_board_ack m;
	struct err why;
	int r = wire_board_ack_get(body, &m);

	if (r < 0)
		return err_pass(r);
	list_foreach(said, &site->directory->said, link) {
		if (said->cookie == m.cookie)
			found = said;
	}
	if (!found)
		return 0; /* withdrawn meanwhile */
	if (!m.code) {
		found->taken |= bit;
		found->refused &= ~bit;
		said_look(found);
		return 0;
	}
	found->taken &= ~bit;
	if (err_from_wire(m.code) == ERR_BUSY) {
		board_tick_start(site->directory); /* its holder is away */
		return 0;
	}
	/* its holder may be gone for good, and the board may not know that yet */
	if (err_from_wire(m.code) == ERR_EXIST && !found->done &&
	    !(found->contested & bit)) {
		found->contested |= bit;
		found->owed[site->index] = SAID_RECORD | SAID_LOAD;
		if (!loop_timer_running(&site->directory->say_timer))
			loop_timer_start(&site->directory->say_timer, CONTEST_NS);
		return 0;
	}
	board_tick_start(site->directory);
	err_set(&why, err_from_wire(m.code), "the board at %.100s says: \"%s\"",
		site->endpoint, m.text);
	if (!(found->refused & bit))
		log_warn("cluster", site->endpoint, "a rank is not taken",
			 "group='%s' worker='%s' why='%s'", found->place.group,
			 found->place.worker, m.text);
	found->refused |= bit;
	if (!found->done)
		said_finish(found, &why);
	return 0;
}

void board_said_site_up(struct board_site *site)
{
	struct board_said *said;

	list_foreach(said, &site->directory->said, link) {
		said->taken &= ~(1u << site->index);
		said_owe(said, site->index, SAID_RECORD | SAID_LOAD);
	}
}

void board_said_site_down(struct board_site *site)
{
	struct board_said *said;

	list_foreach_safe(said, &site->directory->said, link) {
		said->taken &= ~(1u << site->index);
		said->refused &= ~(1u << site->index);
		said_look(said);
	}
}

bool board_said_again(struct board_directory *d)
{
	struct board_said *said;
	bool more = false;

	list_foreach(said, &d->said, link) {
		for (unsigned int i = 0; i < d->count; i++) {
			if (!d->sites[i].up || said->taken & 1u << i)
				continue;
			said_owe(said, i, SAID_RECORD | SAID_LOAD);
			more = true;
		}
	}
	return more;
}

void board_said_init(struct board_directory *d)
{
	list_init(&d->said);
	strmap_init(&d->said_at);
	loop_timer_init(&d->say_timer, d->loop, on_say_timer);
	loop_defer_init(&d->say, board_on_say);
}

void board_said_fini(struct board_directory *d)
{
	struct board_said *said;

	list_foreach_safe(said, &d->said, link)
		said_free(said);
	strmap_fini(&d->said_at);
	loop_timer_stop(&d->say_timer);
	loop_defer_cancel(&d->say);
}
