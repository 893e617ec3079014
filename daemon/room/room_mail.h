/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room_mail: page lists of rooms' messages, written and read. What is short is done at
 * once; a long one some pages a turn, meanwhile it is a mail of its room. The room's
 * failure or end drops its mails, and a party's loss that party's messages.
 */
#ifndef KVD_ROOM_MAIL_H
#define KVD_ROOM_MAIL_H

#include "daemon/room/room.h"
#include "proto/wire.h"

/* A message that came. `owned`: its memory, for the callee to take; NULL: `body` is gone
 * when the call returns. */
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
	struct move *move; /* whose request's pages are read; its `mail` is this */
	uint8_t *body;
	/* one that goes */
	enum wire_type type;
	struct cursor out;
	size_t views_at;
	struct maps_writer writer;
	/* one that came */
	struct maps_reader reader;
	void (*then)(struct mail *mail, const struct err *why);
	struct wire_offer offer; /* pull: the message, for `then` */
};

/* Tell the party of room->pages.maps, and (TRANSFER_INFO) of what is wanted of it, now or
 * in later turns. `put` writes the message, whose last fields the two are. ERR_TOOBIG. */
int mail_tell(struct party *party, enum wire_type type,
	      int (*put)(const struct party *party, struct wire_blob views,
			 struct wire_blob wants, struct cursor *out));
/* Is such a message to this party being written? */
bool mail_telling(const struct party *party);

/*
 * Read pages of `layout` from *in. 0: *maps_p has them and *in is behind them. Outcome 1:
 * `then` will be called, with an error or with mail->reader.maps, which is taken, and
 * mail->reader.in, which is behind them; the mail is freed after it. *mail_p may get what
 * the caller wants to know then. The bytes are msg's; msg NULL: they stay as long as
 * the move.
 */
int mail_read(struct party *party, struct move *move, struct room_message *msg,
	      struct cursor *in, const struct layout *layout,
	      void (*then)(struct mail *mail, const struct err *why),
	      struct room_maps *maps_p, struct mail **mail_p);

void mail_drop(struct mail *mail); /* NULL is fine */
/* Of one party all but requests that are being read: those must be answered. NULL: all.
 */
void mails_drop(struct room *room, const struct party *party);

#endif
