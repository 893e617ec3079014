/* SPDX-License-Identifier: Apache-2.0 */
/* The own daemon's messages to its board and back: as a peer's, but that they are queued
 * here. */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/board_impl.h"

#define HEARD_MAX 16u /* of the board's, that are not handed over */

struct board_letter {
	struct list link;
	unsigned int type;
	size_t len;
	uint8_t body[];
};

static int letter_put(struct list *to, unsigned int type, const void *body, size_t len)
{
	struct board_letter *letter = mem_alloc(sizeof(*letter) + len);

	if (!letter)
		return err_pass(-ENOMEM);
	letter->type = type;
	letter->len = len;
	memcpy(letter->body, body, len);
	list_push_back(to, &letter->link);
	return 0;
}

static struct board_letter *letter_take(struct list *from)
{
	struct list *link = list_pop_front(from);

	return link ? list_entry(link, struct board_letter, link) : NULL;
}

static void board_local_hand(struct board_local *local, unsigned int type,
			     const void *bytes, size_t len)
{
	struct board_owner *owner = board_owner_of(local->board, NULL, local);
	struct cursor body;

	cursor_read(&body, bytes, len);
	/* what this daemon wrote can be read; without memory it is said again */
	if (!owner || board_hear(local->board, owner, type, &body) < 0)
		err_clear();
	if (owner)
		board_owner_idle(local->board, owner);
}

static void board_local_hand_all(struct board_local *local)
{
	struct board_letter *letter;

	while ((letter = letter_take(&local->said))) {
		board_local_hand(local, letter->type, letter->body, letter->len);
		mem_free(letter);
	}
}

static void on_deliver(struct loop_defer *defer)
{
	struct board_local *local = container_of(defer, struct board_local, deliver);
	struct board_letter *letter;
	struct cursor body;

	board_local_hand_all(local);
	while ((letter = letter_take(&local->heard))) {
		local->heard_count--;
		cursor_read(&body, letter->body, letter->len);
		local->hear(local, letter->type, &body);
		mem_free(letter);
	}
}

int board_local_say(struct board_local *local, unsigned int type, const void *body,
		    size_t len)
{
	if (letter_put(&local->said, type, body, len) == 0) {
		loop_defer(local->board->loop, &local->deliver);
		return 0;
	}
	/* What is taken back must not stay for want of memory: now, in its order. The
	 * board calls nobody back. */
	err_clear();
	board_local_hand_all(local);
	board_local_hand(local, type, body, len);
	return 0;
}

int board_local_tell(struct board_local *local, unsigned int type, const void *body,
		     size_t len)
{
	if (local->heard_count >= HEARD_MAX && type == WIRE_T_BOARD_TOLD)
		return err_raise(ERR_LIMIT, "%u messages wait", local->heard_count);
	loop_defer(local->board->loop, &local->deliver);
	if (letter_put(&local->heard, type, body, len) < 0)
		return err_pass(-ENOMEM);
	local->heard_count++;
	return 0;
}

void board_local_open(struct board_local *local, struct board *board,
		      void (*hear)(struct board_local *local, unsigned int type,
				   struct cursor *body))
{
	*local = (struct board_local){.board = board, .hear = hear};
	list_init(&local->said);
	list_init(&local->heard);
	loop_defer_init(&local->deliver, on_deliver);
	list_push_back(&board->locals, &local->link);
}

void board_local_close(struct board_local *local)
{
	struct board_letter *letter;

	if (!local->board)
		return;
	loop_defer_cancel(&local->deliver);
	while ((letter = letter_take(&local->said)) ||
	       (letter = letter_take(&local->heard)))
		mem_free(letter);
	if (local->owner)
		board_owner_gone(local->board, local->owner);
	list_remove(&local->link);
	local->board = NULL;
}
