/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room_mail: writes and reads the page lists in messages of rooms. Short lists are
 * processed at once; long ones some pages a turn, meanwhile as a mail of the room. The
 * failure or end of a room drops its mails; the loss of a party drops the mails of that
 * party.
 */
#ifndef KVD_ROOM_MAIL_H
#define KVD_ROOM_MAIL_H

#include "daemon/room/room.h"
#include "proto/wire.h"

/* A received message. `owned`: its memory, which the callee may take; NULL: `body` is
 * only valid during the call. */
struct room_message {
	const uint8_t *body;
	size_t len;
	uint8_t *owned;
};

struct mail {
	struct list link; /* in room->mails */
	struct loop_defer go;
	struct loop_timer crowded; /* until more of the peer's queue is free */
	struct room *room;
	struct party *party;
	struct move *move; /* the move whose request is read; its `mail` is this */
	uint8_t *body;
	/* of a message being written */
	enum wire_type type;
	struct cursor out;
	size_t views_at;
	struct maps_writer writer;
	/* of a received message */
	struct maps_reader reader;
	void (*then)(struct mail *mail, const struct err *why);
	struct wire_offer offer; /* pull: the message, for `then` */
};

/* Send room->pages.maps to the party, and (TRANSFER_INFO) the wanted units, now or in
 * later turns. `put` writes the message, whose last fields are these two. ERR_TOOBIG. */
int mail_tell(struct party *party, enum wire_type type,
	      int (*put)(const struct party *party, struct wire_blob views,
			 struct wire_blob wants, struct cursor *out));
/* Is a message with pages to this party being written? */
bool mail_telling(const struct party *party);

/*
 * Read pages of `layout` from *in. `among`: NULL, or they must be those of these maps,
 * for the same tokens; they stay as long as the move. 0: done, *maps_p has them and *in
 * is after them. Outcome 1: `then` follows, with an error or with mail->reader.maps,
 * which is taken, and mail->reader.in, which is after them; the mail is freed afterwards.
 * `selects`: they may have a selection. *mail_p may store data for `then`. The bytes
 * belong to msg; msg NULL: they stay valid as long as the move.
 */
int mail_read(struct party *party, struct move *move, struct room_message *msg,
	      struct cursor *in, const struct layout *layout,
	      const struct room_maps *among, bool selects,
	      void (*then)(struct mail *mail, const struct err *why),
	      struct room_maps *maps_p, struct mail **mail_p);

void mail_drop(struct mail *mail); /* NULL is fine */
/* Drop the mails of one party except requests that are being read, which must be
 * answered. NULL: all. */
void mails_drop(struct room *room, const struct party *party);

#endif
