/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this daemon publishes on boards. What a site is owed is sent in a later turn, and
 * as its line has room: of many changes of one entry the last is. A publication is done
 * when every site that is up has it, and at least one. It is refused when one refuses it
 * before that, and then taken back where it was accepted. What is refused later, because
 * somebody took the place while this daemon was away, is put again every third of the
 * lease.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/board_directory_impl.h"

#define PUT_BYTES (DIRECTORY_RECORD_MAX + DIRECTORY_LOAD_MAX + BOARD_NAMES_MAX + 128u)
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

static void said_free(struct board_said *said)
{
	struct board_directory *d = said->directory;

	for (unsigned int i = 0; i < d->count; i++) {
		if (!(said->refused & 1u << i))
			said_drop(&d->sites[i], said);
	}
	if (said->publication)
		said->publication->impl = NULL;
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
	if (record && strlen(record) >= DIRECTORY_RECORD_MAX)
		return err_raise(ERR_TOOBIG, "record: %zu bytes, at most %u",
				 strlen(record), DIRECTORY_RECORD_MAX - 1);
	if (load && strlen(load) >= DIRECTORY_LOAD_MAX)
		return err_raise(ERR_TOOBIG, "load: %zu bytes, at most %u", strlen(load),
				 DIRECTORY_LOAD_MAX - 1);
	return 0;
}

int board_publish(struct directory *directory, struct publication *publication,
		  const struct place *place, const char *record, const char *load)
{
	struct board_directory *d = board_directory_of(directory);
	struct board_said *said;
	int r = place_check(place);

	assert(!publication->impl);
	if (r == 0)
		r = board_check_texts(record, load);
	if (r < 0)
		return err_pass(r);
	said = mem_zalloc(sizeof(*said));
	if (!said)
		return err_pass(-ENOMEM);
	said->place = *place;
	if (!text_set(&said->record, record) || (load && !text_set(&said->load, load))) {
		mem_free(said->record);
		mem_free(said);
		return err_pass(-ENOMEM);
	}
	said->publication = publication;
	said->directory = d;
	said->cookie = ++d->cookies;
	publication->impl = said;
	list_push_back(&d->said, &said->link);
	for (unsigned int i = 0; i < d->count; i++)
		said_owe(said, i, SAID_RECORD | SAID_LOAD);
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
	board_tick_start(site->directory);
	err_set(&why, err_from_wire(m.code), "the board at %.100s says: \"%.190s\"",
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
	loop_timer_init(&d->say_timer, d->loop, on_say_timer);
	loop_defer_init(&d->say, board_on_say);
}

void board_said_fini(struct board_directory *d)
{
	struct board_said *said;

	list_foreach_safe(said, &d->said, link)
		said_free(said);
	loop_timer_stop(&d->say_timer);
	loop_defer_cancel(&d->say);
}
