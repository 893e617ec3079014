/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Page lists in the messages of rooms, in turns.
 *
 * TRANSFER_INFO, OFFER and the headers of chunks and pulls name a room's pages. Short
 * lists are written and read in place; 65 536 scattered pages would hold the loop for as
 * long as all other work of a turn together. So the list of such a room is written into
 * separate memory, which the peer then sends in parts (peer_parts.c), and read from the
 * memory of the assembled parts; both by a deferred call that processes
 * config->peer_part_bytes and defers itself. Helper threads are not used: the data
 * belongs to a room that may fail in between, and must then be freed at once.
 *
 * Writing a list waits while half of the peer's queue is full: the lists of one engine
 * must not fill it, because then the peering ends, and the rooms of others with it.
 *
 * A message takes effect when all of it is read. Until then its party has no part of it,
 * and the room waits as it did before the message.
 */
#include "daemon/room/room_mail.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/base/context.h"
#include "daemon/room/room_wire.h"
#include "daemon/session/session.h"

#define RUN_BYTES 8u
#define CROWDED_NS (5 * LOOP_NS_PER_MS)
#define FIXED_BYTES 384u /* of either message, an upper bound */

/* Pages that a turn writes or reads. */
static size_t pages_a_turn(const struct room *room)
{
	return room->session->kvd->config->peer_part_bytes / RUN_BYTES;
}

/* ---- life ---- */

static void on_crowded(struct loop_timer *timer)
{
	struct mail *mail = container_of(timer, struct mail, crowded);

	loop_defer(mail->room->session->kvd->loop, &mail->go);
}

static struct mail *mail_new(struct party *party, void (*run)(struct loop_defer *go))
{
	struct mail *mail = mem_zalloc(sizeof(*mail));

	if (!mail)
		return NULL;
	mail->room = party->room;
	mail->party = party;
	loop_defer_init(&mail->go, run);
	loop_timer_init(&mail->crowded, party->room->session->kvd->loop, on_crowded);
	list_push_back(&party->room->mails, &mail->link);
	return mail;
}

void mail_drop(struct mail *mail)
{
	if (!mail)
		return;
	loop_defer_cancel(&mail->go);
	loop_timer_stop(&mail->crowded);
	list_remove(&mail->link);
	if (mail->move)
		mail->move->mail = NULL;
	maps_reader_fini(&mail->reader);
	mem_free_large(mail->body, mail->reader.in.size);
	mem_free(mail);
}

void mails_drop(struct room *room, const struct party *party)
{
	struct mail *mail;

	list_foreach_safe(mail, &room->mails, link) {
		/* the end of a request belongs to its transport, or to the room */
		if (!party || (mail->party == party && !mail->move))
			mail_drop(mail);
	}
}

static void room_mail_again(struct mail *mail)
{
	loop_defer(mail->room->session->kvd->loop, &mail->go);
}

/* Its room has not processed a loss yet (rooms_loss.c), which may end this: its step
 * first. */
static bool is_behind(struct mail *mail)
{
	if (!rooms_behind(mail->room))
		return false;
	room_kick(mail->room);
	room_mail_again(mail);
	return true;
}

/* ---- out ---- */

static int room_mail_too_large(enum wire_type type)
{
	return err_raise(ERR_TOOBIG, "%s: pages and wants need more than %zu bytes",
			 type == WIRE_T_OFFER ? "offer" : "room.bind",
			 wire_body_cap(type));
}

bool mail_telling(const struct party *party)
{
	const struct mail *mail;

	list_foreach(mail, &party->room->mails, link) {
		if (mail->party == party && !mail->then)
			return true;
	}
	return false;
}

/* Set the length of the blob that starts at `at`: `bytes`. */
static void blob_end(struct cursor *out, size_t at)
{
	struct cursor length;

	if (out->bad)
		return;
	cursor_write(&length, out->base + at - 4, 4);
	cursor_put_u32(&length, (uint32_t)(out->pos - at));
}

/* TRANSFER_INFO's last fields, as wire_transfer_info_put() writes them. */
static void put_tail(struct cursor *out, const struct room *room)
{
	const struct room_names *names = room->names;

	cursor_put_str(out, names ? names->request_id : "");
	cursor_put_str(out, names ? names->traceparent : "");
	cursor_put_bytes(out, room->admit.ticket, TICKET_BYTES);
}

static size_t tail_bytes(const struct room_names *names)
{
	return 2 + 2 + TICKET_BYTES +
	       (names ? strlen(names->request_id) + strlen(names->traceparent) : 0);
}

static int letter_send(struct mail *mail)
{
	const struct party *party = mail->party;
	struct cursor *out = &mail->out;
	size_t wants_at;

	blob_end(out, mail->views_at);
	if (mail->type == WIRE_T_TRANSFER_INFO) {
		cursor_put_u32(out, 0); /* the length's place */
		wants_at = out->pos;
		wants_put(out, party->wants, party->want_count);
		blob_end(out, wants_at);
		put_tail(out, mail->room);
	}
	if (out->bad || out->pos > wire_body_cap(mail->type))
		return err_pass(room_mail_too_large(mail->type));
	if (out->pos <= pages_a_turn(mail->room) * RUN_BYTES) /* few runs, after all */
		return err_pass(
			handshake_send(party->remote, mail->type, out->base, out->pos));
	return err_pass(handshake_send_owned(party->remote, mail->type,
					     mem_steal(mail->body), out->pos));
}

static void on_write(struct loop_defer *go)
{
	struct mail *mail = container_of(go, struct mail, go);
	struct room *room = mail->room;
	int r;

	if (is_behind(mail))
		return;
	if (room_live(room) && maps_write_some(&mail->writer, pages_a_turn(room))) {
		room_mail_again(mail);
		return;
	}
	if (room_live(room) &&
	    !peer_has_spare(mail->party->remote->peer, mail->out.pos)) {
		loop_timer_start(&mail->crowded, CROWDED_NS);
		return;
	}
	r = room_live(room) ? letter_send(mail) : 0;
	mail_drop(mail);
	if (r < 0)
		room_fail_last(room);
	room_kick(room);
}

static int letter_begin(struct party *party, enum wire_type type,
			int (*put)(const struct party *party, struct wire_blob views,
				   struct wire_blob wants, struct cursor *out))
{
	const struct room_maps *maps = &party->room->pages.maps;
	const size_t blobs = type == WIRE_T_TRANSFER_INFO ? 2 : 1;
	size_t most = FIXED_BYTES + maps_writer_most(maps) +
		      wants_wire_bytes(party->want_count);
	struct mail *mail = mail_new(party, on_write);

	if (!mail)
		return err_pass(-ENOMEM);
	mail->type = type;
	if (most > wire_body_cap(type))
		most = wire_body_cap(type);
	mail->body = mem_alloc(most);
	if (!mail->body) {
		mail_drop(mail);
		return err_pass(-ENOMEM);
	}
	cursor_write(&mail->out, mail->body, most);
	if (put(party, (struct wire_blob){0}, (struct wire_blob){0}, &mail->out) < 0) {
		mail_drop(mail);
		return err_pass(-EMSGSIZE);
	}
	/* its last blobs are empty yet: their lengths are written, then the tail */
	mail->out.pos -= 4 * (blobs - 1);
	if (type == WIRE_T_TRANSFER_INFO)
		mail->out.pos -= tail_bytes(party->room->names);
	mail->views_at = mail->out.pos;
	maps_writer_begin(&mail->writer, &mail->out, maps);
	room_mail_again(mail);
	return 0;
}

int mail_tell(struct party *party, enum wire_type type,
	      int (*put)(const struct party *party, struct wire_blob views,
			 struct wire_blob wants, struct cursor *out))
{
	struct room *room = party->room;
	struct handshake *hs = room->session->kvd->handshake;
	struct cursor blobs, out;
	size_t views_len, pages = 0;

	assert(room_live(room));
	for (size_t i = 0; i < room->pages.maps.count; i++)
		pages += room->pages.maps.maps[i].page_count;
	if (pages > pages_a_turn(room))
		return err_pass(letter_begin(party, type, put));
	handshake_blob(hs, &blobs);
	room_maps_put(&blobs, &room->pages.maps);
	views_len = blobs.pos;
	wants_put(&blobs, party->wants, party->want_count);
	handshake_body(hs, &out);
	if (blobs.bad ||
	    put(party, (struct wire_blob){blobs.base, views_len},
		(struct wire_blob){blobs.base + views_len, blobs.pos - views_len},
		&out) < 0 ||
	    out.pos > wire_body_cap(type))
		return err_pass(room_mail_too_large(type));
	return err_pass(handshake_send(party->remote, type, out.base, out.pos));
}

/* ---- in ---- */

static void room_mail_on_read(struct loop_defer *go)
{
	struct mail *mail = container_of(go, struct mail, go);
	struct room *room = mail->room;
	struct err why;
	int r;

	if (is_behind(mail))
		return;
	r = maps_read_some(&mail->reader, pages_a_turn(room));
	if (r > 0) {
		room_mail_again(mail);
		return;
	}
	if (r < 0)
		err_take(&why);
	list_remove(&mail->link); /* regardless of the effect of `then` on the room */
	if (mail->move)
		mail->move->mail = NULL;
	mail->then(mail, r < 0 ? &why : NULL);
	mail->move = NULL;
	mail_drop(mail);
	room_kick(room);
}

/* Keep the bytes when the message is freed. */
static int keep_body(struct mail *mail, struct room_message *msg)
{
	if (!msg)
		return 0;
	mail->body = mem_steal(msg->owned);
	if (!mail->body)
		mail->body = mem_dup(msg->body, msg->len);
	if (!mail->body)
		return err_pass(-ENOMEM);
	maps_reader_rebase(&mail->reader,
			   mail->body + (mail->reader.in.base - msg->body));
	return 0;
}

static int read_later(struct party *party, struct move *move, struct room_message *msg,
		      const struct maps_reader *reader,
		      void (*then)(struct mail *mail, const struct err *why),
		      struct mail **mail_p)
{
	struct mail *mail = mail_new(party, room_mail_on_read);

	if (!mail)
		return err_pass(-ENOMEM);
	mail->reader = *reader;
	mail->then = then;
	if (keep_body(mail, msg) < 0) {
		mail->reader.maps = (struct room_maps){0}; /* the caller's */
		mail_drop(mail);
		return err_pass(-ENOMEM);
	}
	mail->move = move;
	if (move)
		move->mail = mail;
	room_mail_again(mail);
	*mail_p = mail;
	return 1;
}

int mail_read(struct party *party, struct move *move, struct room_message *msg,
	      struct cursor *in, const struct layout *layout,
	      const struct room_maps *among, bool selects,
	      void (*then)(struct mail *mail, const struct err *why),
	      struct room_maps *maps_p, struct mail **mail_p)
{
	struct maps_reader reader;
	int r = maps_reader_begin(&reader, in, layout, party->remote->account);

	assert(!move || (move->party == party && !move->mail));
	*maps_p = (struct room_maps){0};
	reader.among = among;
	reader.selects = selects;
	if (r >= 0)
		r = maps_read_some(&reader, pages_a_turn(party->room));
	if (r > 0)
		r = read_later(party, move, msg, &reader, then, mail_p);
	if (r < 0)
		maps_reader_fini(&reader);
	if (r != 0)
		return r < 0 ? err_pass(r) : r;
	*maps_p = reader.maps;
	*in = reader.in;
	return 0;
}
